"""Find the log of a training: a file, or the one that lies somewhere in a --save-dir."""

import os
from pathlib import Path

from fairseq_tutel.tools.event_files import read_events
from fairseq_tutel.tools.training_log import Log, read_log

LOG_NAMES = ("*.log", "*.json", "*.txt")
EVENT_NAMES = "*tfevents*"


def find_log(path: Path) -> tuple[Log, list[Path]]:
    """Return what a training logged, and the files that hold it.

    A folder is searched through, first for fairseq's JSON lines, then for TensorBoard's event files.

    Raises:
        ValueError: the path does not exist, or it holds the records of no training or of several.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a log of fairseq-train, or its --save-dir.")
    texts = _matches(path, *LOG_NAMES) if path.is_dir() else [path]
    events = _matches(path, EVENT_NAMES) if path.is_dir() or "tfevents" in path.name else []
    logs = {text: _read(text) for text in texts if text not in events}
    found = _without_copies({text: log for text, log in logs.items() if log.entries})
    if len(found) > 1:
        names = ", ".join(map(str, sorted(found)[:3])) + ", …" * (len(found) > 3)
        raise ValueError(
            f"{path} holds the logs of several trainings ({names}); name one of them, or several to "
            "overlay them; if they are parts of one training, join them in one file first."
        )
    if found:
        ((text, log),) = found.items()
        return log, [text]
    log = read_events(events, path)
    if log.entries:
        return log, events
    searched = f"{len(logs)} file(s) named {', '.join(LOG_NAMES)}" if path.is_dir() else "it"
    folder = path if path.is_dir() else path.parent
    raise ValueError(
        f"{path} holds no record of a training: looked for fairseq's JSON lines in {searched}, and for "
        f"TensorBoard's event files; train with --log-format json --log-file {folder}/train.log."
    )


def default_names(paths: list[Path]) -> list[str]:
    """Return what tells the paths of runs apart: their parts without those that all share."""
    parts = [
        list((path.with_suffix("") if path.is_file() else path).parts)
        for path in (Path(os.path.abspath(path)) for path in paths)
    ]
    for end in (0, -1):
        while all(len(p) > 1 for p in parts) and len({p[end] for p in parts}) == 1:
            for p in parts:
                p.pop(end)
    return ["/".join(p) for p in parts]


def _matches(folder: Path, *patterns: str) -> list[Path]:
    return sorted({p for pattern in patterns for p in folder.rglob(pattern) if p.is_file()})


def _read(path: Path) -> Log:
    with open(path, encoding="utf-8", errors="replace") as lines:
        return read_log(lines)


def _without_copies(logs: dict[Path, Log]) -> dict[Path, Log]:
    """Leave out a log whose every record is in another one, such as a captured output."""
    kept: dict[Path, set[str]] = {}
    for path, log in sorted(logs.items(), key=lambda item: -len(item[1].entries)):
        records = {repr(entry) for entry in log.entries}
        if not any(records <= more for more in kept.values()):
            kept[path] = records
    return {path: logs[path] for path in kept}
