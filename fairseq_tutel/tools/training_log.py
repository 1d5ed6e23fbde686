"""Reads fairseq's training logs, and joins the records of a run that was resumed.

A log record is a line that ends in JSON: `… | train_inner | {"epoch": 1, …}` in a captured output,
`[…][train_inner][INFO] - {…}` under hydra, or only JSON in a `--log-file`. In a record, the key that ends
in `num_updates` has the number of the update. This key's prefix is the data subset. Lines in fairseq's log
format `simple` are records, too: `epoch 001: 20 / 100 loss=5.1, num_updates=20` and `epoch 001 | valid on
'valid' subset | loss 5.2 | num_updates 100`.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from fairseq_tutel.files import open_ordinary, parse_json

LOG_NAMES = ("*.log", "*.json", "*.txt")  # These files in a folder may be logs.

# Training records have these tags; validation records have the name of a data subset as tag.
SINCE_LAST, EPOCH = "train_inner", "train"
LOAD = "moe_load_"  # Keys of expert loads have this prefix.

_UPDATES = "num_updates"
_SIMPLE = re.compile(r"\bepoch \d+(?:(:) +\d+ / \d+ | \| (?:valid on '(.+?)' subset \| )?)(\w+[ =].*)")
_SIMPLE_VALUE = re.compile(r"(\w+)[ =](\[.*?\]|[^,|\s]+)")
_PROCESS_STARTS = re.compile(r"training on (\d+) devices")


@dataclass(frozen=True)
class Record:
    """The numbers and lists in one record of a training log."""

    tag: str
    update: int
    values: dict[str, float]
    lists: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = math.nan  # The training time until this record, or nan.


@dataclass
class Log:
    """The records of one log file, in the order of the file."""

    entries: list[Record] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # The number of records before each start of a process.
    ranks: list[int] = field(default_factory=list)  # The number of ranks at each start of a process.


@dataclass(frozen=True)
class Run:
    """The records of one training run, from all of its processes if the run was resumed."""

    records: dict[str, list[Record]]  # The records of each tag, in the order of updates.
    ranks: list[int]  # The number of ranks at the start and after each change.
    notes: list[str]  # Notes on the run for the readers of a report.

    @property
    def training(self) -> list[Record]:
        """The training records: one per log interval or, if there are none, one per epoch."""
        return self.records.get(SINCE_LAST) or self.records.get(EPOCH, [])

    @property
    def subsets(self) -> dict[str, list[Record]]:
        """A dictionary from the name of each validation subset to its records."""
        return {tag: r for tag, r in self.records.items() if tag not in (SINCE_LAST, EPOCH)}

    @property
    def experts(self) -> dict[str, int]:
        """A dictionary from the log key of each MoE layer's loads to the layer's number of experts."""
        lists = [item for record in self.all for item in record.lists.items()]
        return {key: len(load) for key, load in lists if key.startswith(LOAD)}

    @property
    def seconds(self) -> float:
        """The total training time of a run in seconds, or nan if unknown."""
        return max((r.seconds for r in self.all if not math.isnan(r.seconds)), default=math.nan)

    @property
    def all(self) -> list[Record]:
        """The records of a run under all tags."""
        return [record for records in self.records.values() for record in records]


def read_log(lines: Iterable[str]) -> Log:
    """Return the records in the lines of a training log; all other lines are ignored."""
    log, last = Log(), ""
    for line in lines:
        if found := _PROCESS_STARTS.search(line):
            log.starts.append(len(log.entries))
            log.ranks.append(int(found[1]))
        simple = _SIMPLE.search(line)
        text = simple[0] if simple else line[line.find('{"') :].strip() if '{"' in line else ""
        # fairseq adds a file handler to its logger in every epoch, so the log file repeats lines.
        if not text or text == last:
            continue
        last = text
        try:
            entry = _read_entry(_simple_stats(simple) if simple else parse_json(text))
        except ValueError:  # A line may be truncated.
            continue
        if entry is not None:
            log.entries.append(entry)
    return log


def _simple_stats(found: re.Match[str]) -> dict[str, object]:
    """Convert a line of fairseq's log format `simple` to keys and values of JSON; numbers remain text."""
    prefix = "" if found[1] else f"{found[2] or EPOCH}_"
    return {
        prefix + key: value[1:-1].split(", ") if value.startswith("[") else value
        for key, value in _SIMPLE_VALUE.findall(found[3])
    }


def _read_entry(stats: object) -> Record | None:
    if not isinstance(stats, dict):
        return None
    key = next((key for key in stats if key.endswith(_UPDATES)), None)
    update = None if key is None else _number(stats[key])
    if key is None or update is None or not math.isfinite(update):
        return None
    prefix = key.removesuffix(_UPDATES)
    entry = Record(prefix.removesuffix("_") or SINCE_LAST, int(update), {})
    for name, value in stats.items():
        if isinstance(value, list):
            numbers = [_number(x) for x in value]
            entry.lists[name.removeprefix(prefix)] = [math.nan if x is None else x for x in numbers]
        elif (number := _number(value)) is not None:
            entry.values[name.removeprefix(prefix)] = number
    return entry


def join(log: Log) -> Run:
    """Join the records of all processes in a log to one run, without repeated updates.

    A resumed process repeats the updates since its checkpoint, so earlier records of these updates are
    removed. The logged `wall` begins at 0 in every process, so the times of all processes are added. After
    a resume within an epoch, `wall` stays 0, and the time is computed from the logged speed.
    """
    notes: list[str] = []
    kept: list[Record] = []
    seconds = 0.0
    for entries in _processes(log):
        first = entries[0].update
        if kept:
            notes.append(f"Resumed: a new process logs from update {first} on.")
            kept = [record for record in kept if record.update < first]
        before, now, last = seconds, math.nan, kept[-1].update if kept else 0
        stopped = not any(entry.values.get("wall") for entry in entries)
        for entry in entries:
            if stopped and entry.tag == SINCE_LAST and entry.values.get("ups", 0) > 0:
                now = seconds = seconds + (entry.update - last) / entry.values["ups"]
                last = entry.update
            elif not stopped and "wall" in entry.values:
                now = seconds = before + entry.values["wall"]
            kept.append(replace(entry, seconds=now))
    by_tag: dict[str, dict[int, Record]] = {}
    for record in kept:
        by_tag.setdefault(record.tag, {})[record.update] = record
    ranks = [number for number, _ in groupby(log.ranks)]
    return Run({tag: list(of.values()) for tag, of in by_tag.items()}, ranks, notes)


def _processes(log: Log) -> list[list[Record]]:
    """Split a log's records by process; a new process has a start line, or resets updates or time."""
    parts: list[list[Record]] = []
    last_wall = math.nan
    for index, entry in enumerate(log.entries):
        wall = entry.values.get("wall", math.nan)
        goes_back = index and (entry.update < log.entries[index - 1].update or wall < last_wall)
        if goes_back or index in log.starts or not parts:
            parts.append([])
            last_wall = math.nan  # Comparisons with nan are false.
        parts[-1].append(entry)
        last_wall = last_wall if math.isnan(wall) else wall
    return parts


def _number(value: object) -> float | None:
    """Convert a logged value, which may be text, to a number, or return None if it is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError):
        return None


def _lines_of(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_ordinary) as file:
            yield from file
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} does not exist; give a log of fairseq-train, or its --save-dir."
        ) from error


def find_log(path: Path) -> tuple[Log, Path]:
    """Find the log of a training run, and return the log's records and path.

    `path` is a log file or a folder. ValueError is raised if there is no log, or logs of several runs.
    """
    files = [path]
    if path.is_dir():
        files = sorted({p for pattern in LOG_NAMES for p in path.rglob(pattern) if p.is_file()})
    logs = {file: read_log(_lines_of(file)) for file in files}
    found = _without_copies({file: log for file, log in logs.items() if log.entries})
    if len(found) > 1:
        names = ", ".join(map(str, sorted(found)))
        raise ValueError(f"{path} contains the logs of several runs ({names}); give one of these files.")
    if not found:
        folder = path if path.is_dir() else path.parent
        raise ValueError(
            f"{path} has no training record; train with --log-format json --log-file {folder}/train.log."
        )
    ((file, log),) = found.items()
    return log, file


def _without_copies(logs: dict[Path, Log]) -> dict[Path, Log]:
    """Remove each log whose records are all contained in another log of the same run."""
    kept: dict[Path, set[str]] = {}
    for path, log in sorted(logs.items(), key=lambda item: -len(item[1].entries)):
        records = {repr(entry) for entry in log.entries}
        if not any(records <= more for more in kept.values()):
            kept[path] = records
    return {path: logs[path] for path in kept}
