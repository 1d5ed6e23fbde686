"""average: write one checkpoint whose weights are the mean of several checkpoints' weights.

The flags are those of fairseq's scripts/average_checkpoints.py, which its wheel does not hold. Experts
are averaged like all other weights, those of sharded checkpoints too; what is written is one file.
Everything but the weights is the first file's; with --num-epoch- and --num-update-checkpoints that is the
newest one. Its fp32 masters, which are weights too, are left out.
"""

import argparse
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.shards import ShardedTensor, unbind
from fairseq_tutel.moe.options import flag_of
from fairseq_tutel.tools.arguments import add_overwrite, output_path, refuse_output
from fairseq_tutel.checkpoint.reading import load_lazily, write
from fairseq_tutel.zero.state import MASTER

# How fairseq names what each flag takes, with the number that orders the files last.
NAMES = {
    "num_epoch_checkpoints": ("checkpointEPOCH.pt", r"checkpoint(\d+)\.pt"),
    "num_update_checkpoints": ("checkpoint_EPOCH_UPDATE.pt", r"checkpoint_\d+_(\d+)\.pt"),
    "num_best_checkpoints": (
        "checkpoint.best_METRIC_VALUE.pt",
        r"checkpoint\.best_(.+)_(\d+\.?\d*)\.pt",
    ),
}


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "average", help="average the weights of checkpoints", description=__doc__
    )
    text = "checkpoints; or, with one of the --num- flags, the folder that holds them"
    parser.add_argument("--inputs", required=True, nargs="+", metavar="FILE", help=text)
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    add_overwrite(parser)
    number = parser.add_mutually_exclusive_group()
    for key, (name, _) in NAMES.items():
        which = f"last N {name}"
        if key == "num_best_checkpoints":
            which = f"best N {name}, of a folder or of the files given"
        number.add_argument(flag_of(key), type=int, metavar="N", help=f"take the {which}")
    text = "leave out epochs, or updates, after X"
    parser.add_argument("--checkpoint-upper-bound", type=int, metavar="X", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Average what the command line names."""
    output = output_path(arguments.output)
    inputs = chosen_inputs(arguments)
    refuse_output(output, inputs, arguments.overwrite)
    print("averaging", *inputs, sep="\n  ")
    write(average(inputs), output)
    print(f"wrote {arguments.output}")


def chosen_inputs(arguments: argparse.Namespace) -> list[Path]:
    """Return the checkpoints that the command line asks for, the first one first.

    Raises:
        ValueError: a flag that does not fit the others, or fewer checkpoints than asked for.
    """
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
    if flag == "num_best_checkpoints":
        return _best(paths, count)
    for path in paths:
        if path.is_dir():
            raise ValueError(
                f"--inputs names the folder {path}; add --num-epoch-checkpoints, "
                "--num-update-checkpoints or --num-best-checkpoints, or name files."
            )
    return paths


def _last(paths: list[Path], flag: str, count: int, bound: int | None) -> list[Path]:
    """Return the `count` files of the one folder with the greatest numbers, greatest first."""
    if len(paths) == 1 and not paths[0].exists():
        raise ValueError(f"--inputs is {paths[0]}, which does not exist; give a folder.")
    if len(paths) != 1 or not paths[0].is_dir():
        raise ValueError(
            f"{flag_of(flag)} needs --inputs to be one folder; it is {' '.join(map(str, paths))}."
        )
    matches = [(_match(flag, path), path) for path in paths[0].iterdir()]
    found = sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)
    if bound is not None:
        found = [(number, path) for number, path in found if number <= bound]
    _refuse_too_few(flag, count, len(found), bound)
    return [path for _, path in found[:count]]


def _best(paths: list[Path], count: int) -> list[Path]:
    """Return the `count` best of the files named by their metric, the best first."""
    flag = "num_best_checkpoints"
    if len(paths) == 1 and paths[0].is_dir():
        paths = [path for path in sorted(paths[0].iterdir()) if _match(flag, path)]
    _refuse_too_few(flag, count, len(paths))
    values: dict[Path, float] = {}
    metrics = set()
    for path in paths:
        match = _match(flag, path)
        if match is None:
            raise ValueError(f"{flag_of(flag)} needs files named {NAMES[flag][0]}; {path} is none.")
        metrics.add(match[1])
        values[path] = float(match[2])
    if len(metrics) > 1:
        raise ValueError(
            f"{flag_of(flag)} found the metrics {' and '.join(sorted(metrics))}, whose values do not "
            "compare; name the files of one of them in --inputs."
        )
    saved = load_lazily(paths[0], "--inputs").get("cfg") or {}
    larger_is_better = saved.get("checkpoint", {}).get("maximize_best_checkpoint_metric", False)
    return sorted(paths, key=values.__getitem__, reverse=bool(larger_is_better))[:count]


def _match(flag: str, path: Path) -> re.Match[str] | None:
    return re.fullmatch(NAMES[flag][1], path.name)


def _refuse_too_few(flag: str, count: int, found: int, bound: int | None = None) -> None:
    if found < count:
        limit = "" if bound is None else f" up to {bound}"
        raise ValueError(
            f"{flag_of(flag)} is {count}, but --inputs holds only {found} files {NAMES[flag][0]}{limit}; "
            "lower it, or name other files."
        )


def average(paths: list[Path]) -> dict[str, Any]:
    """Return the first checkpoint with the mean of all checkpoints' weights.

    All files are open at once, but read tensor by tensor: what is held in memory is one averaged copy
    of the weights, and experts that stand in shard files once per checkpoint, one tensor at a time.
    Tensors that are one in every file, such as tied embeddings, stay one.

    Raises:
        ValueError: a bad file, or two whose weights differ in name or shape.
    """
    states = [load_lazily(path, "--inputs") for path in paths]
    models = [state["model"] for state in states]
    for path, model in zip(paths[1:], models[1:], strict=True):
        _refuse_other_weights(paths[0], models[0], path, model)
    averaged: OrderedDict[str, Any] = OrderedDict()
    done: dict[tuple, Tensor] = {}
    for key in models[0]:
        tensors = [model[key] for model in models]
        if any(isinstance(tensor, ShardedTensor) for tensor in tensors):
            averaged[key] = mean(
                [t.whole() if isinstance(t, ShardedTensor) else t for t in tensors]
            )
            continue
        if not isinstance(tensors[0], Tensor):
            averaged[key] = tensors[0]
            continue
        identity = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
        if identity not in done:
            done[identity] = mean(tensors)
        averaged[key] = done[identity]
    # A resume would take the first file's weights from there instead of the average.
    kept = {key: _without(MASTER, part) for key, part in states[0].items() if key != "model"}
    unbind(kept)
    return {**kept, "model": averaged}


def _without(name: str, tree: Any) -> Any:
    """Return nested dictionaries without the entries of one name."""
    if not isinstance(tree, dict):
        return tree
    return {key: _without(name, part) for key, part in tree.items() if key != name}


def _refuse_other_weights(first: Path, expected: dict, other: Path, found: dict) -> None:
    for key in (*expected, *found):
        if key not in expected or key not in found:
            holder, lacking = (first, other) if key in expected else (other, first)
            raise ValueError(
                f"{holder} holds the weight {key} and {lacking} does not; average checkpoints of one "
                "model."
            )
        shapes = [tuple(getattr(model[key], "shape", ())) for model in (expected, found)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the weight {key} has the shape {shapes[0]} in {first} and {shapes[1]} in {other}; "
                "average checkpoints of one model."
            )


def mean(tensors: list[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape, in the first one's dtype.

    The sum is taken in a wider type, so that the mean of equal tensors is that tensor, bit for bit;
    integers round down, as in fairseq.
    """
    dtype = tensors[0].dtype
    wider = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    total = torch.zeros_like(tensors[0], dtype=wider if dtype.is_floating_point else torch.int64)
    for tensor in tensors:
        total += tensor
    rounding = None if total.is_floating_point() else "floor"
    return torch.div(total, len(tensors), rounding_mode=rounding).to(dtype)
