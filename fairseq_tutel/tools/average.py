"""average: write one checkpoint with the mean of several checkpoints' weights.

The flags are those of fairseq's scripts/average_checkpoints.py, which its wheel lacks. Sharded checkpoints
are read too; the output is one file. Everything except the weights is copied from the first file, which is
the newest one with --num-epoch-checkpoints and --num-update-checkpoints. fp32 master weights are left out.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint.average import average
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.options.option import flag_of
from fairseq_tutel.tools.arguments import add_overwrite, output_path, refuse_output

# fairseq's names of the files for each flag; the last group is the number to sort by.
NAMES = {
    "num_epoch_checkpoints": ("checkpointEPOCH.pt", r"checkpoint(\d+)\.pt"),
    "num_update_checkpoints": ("checkpoint_EPOCH_UPDATE.pt", r"checkpoint_\d+_(\d+)\.pt"),
    "num_best_checkpoints": ("checkpoint.best_METRIC_VALUE.pt", r"checkpoint\.best_(.+)_(\d+\.?\d*)\.pt"),
}


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser("average", help="average the weights of checkpoints", description=__doc__)
    text = "checkpoints; or, with one of the --num- flags, the folder that holds them"
    parser.add_argument("--inputs", required=True, nargs="+", metavar="FILE", help=text)
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    add_overwrite(parser)
    number = parser.add_mutually_exclusive_group()
    for key, (name, _) in NAMES.items():
        which = f"last N {name}"
        if key == "num_best_checkpoints":
            which = f"best N {name}, in a folder or among the given files"
        number.add_argument(flag_of(key), type=int, metavar="N", help=f"average the {which}")
    text = "leave out epochs, or updates, after X"
    parser.add_argument("--checkpoint-upper-bound", type=int, metavar="X", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Average the checkpoints of the command line."""
    output = output_path(arguments.output)
    inputs = chosen_inputs(arguments)
    refuse_output(output, inputs, arguments.overwrite)
    print("averaging", *inputs, sep="\n  ")
    average(inputs).write(output)
    print(f"wrote {arguments.output}")


def chosen_inputs(arguments: argparse.Namespace) -> list[Path]:
    """Return the checkpoints to average, in order; conflicting flags or too few files are errors."""
    paths = [Path(name) for name in arguments.inputs]
    bound = arguments.checkpoint_upper_bound
    given = {flag: count for flag in NAMES if (count := getattr(arguments, flag)) is not None}
    flag, count = next(iter(given.items()), ("", 1))
    if count < 1:
        raise ValueError(f"{flag_of(flag)} is {count}; give a number of at least 1.")
    if flag in ("num_epoch_checkpoints", "num_update_checkpoints"):
        return _last(paths, flag, count, bound)
    if bound is not None:
        raise ValueError(
            f"--checkpoint-upper-bound is {bound}, which needs --num-epoch-checkpoints or "
            "--num-update-checkpoints; add one of them or drop it."
        )
    return _best(paths, count) if flag else paths


def _last(paths: list[Path], flag: str, count: int, bound: int | None) -> list[Path]:
    """Return the `count` files of the folder with the largest numbers, largest first."""
    if len(paths) != 1 or not paths[0].is_dir():
        raise ValueError(
            f"{flag_of(flag)} needs --inputs to be one folder; it is {' '.join(map(str, paths))}."
        )
    found = [(int(match[1]), path) for match, path in _matching(flag, paths[0])]
    found = [(number, path) for number, path in found if bound is None or number <= bound]
    _refuse_too_few(flag, count, len(found), bound)
    return [path for _, path in sorted(found, reverse=True)[:count]]


def _best(paths: list[Path], count: int) -> list[Path]:
    """Return the `count` best files by the metric in their names, the best first."""
    flag = "num_best_checkpoints"
    if len(paths) == 1 and paths[0].is_dir():
        paths = sorted(path for _, path in _matching(flag, paths[0]))
    _refuse_too_few(flag, count, len(paths))
    values: dict[Path, float] = {}
    metrics = set()
    for path in paths:
        match = re.fullmatch(NAMES[flag][1], path.name)
        if match is None:
            raise ValueError(f"{flag_of(flag)} needs files named {NAMES[flag][0]}; {path} is not.")
        metrics.add(match[1])
        values[path] = float(match[2])
    if len(metrics) > 1:
        raise ValueError(
            f"{flag_of(flag)} found the metrics {' and '.join(sorted(metrics))}, whose values do not "
            "compare; name the files of one of them in --inputs."
        )
    saved = SavedModel.open(paths[0], "--inputs", keep_shards=True).state.get("cfg") or {}
    larger_is_better = saved.get("checkpoint", {}).get("maximize_best_checkpoint_metric", False)
    return sorted(paths, key=values.__getitem__, reverse=bool(larger_is_better))[:count]


def _matching(flag: str, folder: Path) -> list[tuple[re.Match[str], Path]]:
    """Return the files of a folder with a flag's names, matched."""
    return [
        (match, path) for path in folder.iterdir() if (match := re.fullmatch(NAMES[flag][1], path.name))
    ]


def _refuse_too_few(flag: str, count: int, found: int, bound: int | None = None) -> None:
    if found < count:
        limit = "" if bound is None else f" up to {bound}"
        raise ValueError(
            f"{flag_of(flag)} is {count}, but --inputs holds only {found} files {NAMES[flag][0]}{limit}; "
            "lower it, or name other files."
        )
