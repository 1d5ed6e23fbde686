"""average: average the weights of several checkpoints, and write one checkpoint.

The flags but --ema are those of fairseq's scripts/average_checkpoints.py, which is not in fairseq's wheel.
Inputs may be sharded checkpoints; the output is one file. Everything except the weights is copied from the
first file. With --num-epoch-checkpoints or --num-update-checkpoints, the first file is the newest one. fp32
master weights are left out.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from fairseq_tutel.option import flag_of
from fairseq_tutel.tools.arguments import refuse_output
from fairseq_tutel.tools.parser import add_input, add_output

# fairseq's file names for each flag; the last group of the pattern is the number to sort by.
NAMES = {
    "num_epoch_checkpoints": ("checkpointEPOCH.pt", r"checkpoint(\d+)\.pt"),
    "num_update_checkpoints": ("checkpoint_EPOCH_UPDATE.pt", r"checkpoint_\d+_(\d+)\.pt"),
    "num_best_checkpoints": ("checkpoint.best_METRIC_VALUE.pt", r"checkpoint\.best_(.+)_(\d+\.?\d*)\.pt"),
}


def add_to(tools: Any) -> None:
    """Add this tool as a subcommand of `python -m fairseq_tutel`."""
    example = "SAVE --num-epoch-checkpoints 5 --output SAVE/average.pt"
    parser = tools.add_parser("average", description=__doc__, example=example)
    text = "checkpoint files; with one of the --num- flags, the folder that contains them"
    add_input(parser, text, "inputs", "--inputs", several=True)
    add_output(parser, "the checkpoint to write", required=True)
    number = parser.add_mutually_exclusive_group()
    for key, (name, _) in NAMES.items():
        which = f"last N {name}"
        if key == "num_best_checkpoints":
            which = f"best N {name}, in a folder or among the given files"
        number.add_argument(flag_of(key), type=int, metavar="N", help=f"average the {which}")
    text = "ignore checkpoints after epoch (or update) X"
    parser.add_argument("--checkpoint-upper-bound", type=int, metavar="X", help=text)
    text = "average the moving averages that --store-ema saved, instead of the weights"
    parser.add_argument("--ema", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Average the checkpoints that the arguments select, and write the result."""
    from fairseq_tutel.checkpoint.average import average

    inputs = chosen_inputs(arguments)
    refuse_output(arguments.output, inputs, arguments.overwrite)
    print("averaging", *inputs, sep="\n  ")
    average(inputs, arguments.ema).write(arguments.output)
    print(f"wrote {arguments.output}")


def chosen_inputs(arguments: argparse.Namespace) -> list[Path]:
    """Return the selected checkpoints, in order; raise ValueError for wrong flags or too few files."""
    paths = [Path(name) for name in arguments.inputs]
    bound = arguments.checkpoint_upper_bound
    for path in paths:
        if not path.exists():
            raise ValueError(f"INPUTS names {path}, which does not exist; give an existing file or folder.")
    given = {flag: count for flag in NAMES if (count := getattr(arguments, flag)) is not None}
    flag, count = next(iter(given.items()), ("", 1))
    if count < 1:
        raise ValueError(f"{flag_of(flag)} is {count}; give a number of at least 1.")
    if flag in ("num_epoch_checkpoints", "num_update_checkpoints"):
        return _last(paths, flag, count, bound)
    if bound is not None:
        raise ValueError(
            f"--checkpoint-upper-bound is {bound}, which needs --num-epoch-checkpoints or "
            "--num-update-checkpoints; add one of them, or remove --checkpoint-upper-bound."
        )
    return _best(paths, count) if flag else paths


def _last(paths: list[Path], flag: str, count: int, bound: int | None) -> list[Path]:
    """Return the `count` checkpoints of a folder with the largest epochs or updates, largest first."""
    if len(paths) != 1 or not paths[0].is_dir():
        raise ValueError(
            f"{flag_of(flag)} needs one folder, but INPUTS is {' '.join(map(str, paths))}; give a folder."
        )
    found = [(int(match[1]), path) for match, path in _matching(flag, paths[0])]
    found = [(number, path) for number, path in found if bound is None or number <= bound]
    _refuse_too_few(flag, count, len(found), bound)
    return [path for _, path in sorted(found, reverse=True)[:count]]


def _best(paths: list[Path], count: int) -> list[Path]:
    """Return the `count` checkpoints with the best metric values in their file names, best first."""
    flag = "num_best_checkpoints"
    if len(paths) == 1 and paths[0].is_dir():
        paths = sorted(path for _, path in _matching(flag, paths[0]))
    _refuse_too_few(flag, count, len(paths))
    values: dict[Path, float] = {}
    metrics = set()
    for path in paths:
        match = re.fullmatch(NAMES[flag][1], path.name)
        if match is None:
            raise ValueError(f"{flag_of(flag)} needs files named {NAMES[flag][0]}; remove {path}.")
        metrics.add(match[1])
        values[path] = float(match[2])
    if len(metrics) > 1:
        raise ValueError(
            f"{flag_of(flag)} found files for the metrics {' and '.join(sorted(metrics))}, which cannot be "
            "compared; give files for one metric."
        )
    from fairseq_tutel.checkpoint.saved import SavedModel

    saved = SavedModel.open(paths[0], "INPUTS", keep_shards=True).state.get("cfg") or {}
    larger_is_better = saved.get("checkpoint", {}).get("maximize_best_checkpoint_metric", False)
    return sorted(paths, key=values.__getitem__, reverse=bool(larger_is_better))[:count]


def _matching(flag: str, folder: Path) -> list[tuple[re.Match[str], Path]]:
    """Return (match, path) for each file in a folder whose name matches the flag's pattern."""
    return [
        (match, path) for path in folder.iterdir() if (match := re.fullmatch(NAMES[flag][1], path.name))
    ]


def _refuse_too_few(flag: str, count: int, found: int, bound: int | None = None) -> None:
    if found < count:
        limit = "" if bound is None else f" up to {bound}"
        raise ValueError(
            f"{flag_of(flag)} is {count}, but INPUTS has only {found} files {NAMES[flag][0]}{limit}; "
            "give a lower number, or other files."
        )
