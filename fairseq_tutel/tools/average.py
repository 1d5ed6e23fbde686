"""The tool `average` averages the weights of several checkpoints, and writes one checkpoint.

All flags except --ema and --overwrite are from fairseq's scripts/average_checkpoints.py, which is not in
fairseq's wheel. To average the best checkpoints, give SAVE/checkpoint.best_*.pt. The inputs may be sharded
checkpoints; the output is one file. Everything except the weights is copied from the first file, which is
the newest file of a folder. Master weights in fp32 are not copied.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from fairseq_tutel.option import flag_of
from fairseq_tutel.tools.arguments import at_least, refuse_output
from fairseq_tutel.tools.parser import add_input, add_output

# For each flag, the names of fairseq's checkpoints as text and as a pattern. The pattern's group is the
# number by which checkpoints are sorted.
NAMES = {
    "num_epoch_checkpoints": ("checkpointEPOCH.pt", r"checkpoint(\d+)\.pt"),
    "num_update_checkpoints": ("checkpoint_EPOCH_UPDATE.pt", r"checkpoint_\d+_(\d+)\.pt"),
}


def add_to(tools: Any) -> None:
    """Add the tool `average` as a subcommand of `python -m fairseq_tutel`."""
    example = "SAVE --num-epoch-checkpoints 5 --output SAVE/average.pt"
    parser = tools.add_parser("average", description=__doc__, example=example)
    text = "checkpoint files; with one of the --num- flags, the folder that contains them"
    add_input(parser, text, "inputs", "--inputs", several=True)
    add_output(parser, "the checkpoint to write", required=True)
    number = parser.add_mutually_exclusive_group()
    for key, (name, _) in NAMES.items():
        text = f"average the last N {name} of a folder"
        number.add_argument(flag_of(key), type=at_least(1), metavar="N", help=text)
    text = "ignore checkpoints after epoch (or update) X"
    parser.add_argument("--checkpoint-upper-bound", type=int, metavar="X", help=text)
    text = "average the moving averages that --store-ema saved, instead of the weights"
    parser.add_argument("--ema", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Average the checkpoints that the arguments select, and write the new checkpoint."""
    from fairseq_tutel.checkpoint.average import average

    inputs = chosen_inputs(arguments)
    refuse_output(arguments.output, inputs, arguments.overwrite)
    print("averaging", *inputs, sep="\n  ")
    average(inputs, arguments.ema).write(arguments.output)
    print(f"wrote {arguments.output}")


def chosen_inputs(arguments: argparse.Namespace) -> list[Path]:
    """Return the given checkpoints, or the newest N of a folder; raise ValueError if there are too few."""
    paths = [Path(name) for name in arguments.inputs]
    flag = next((flag for flag in NAMES if getattr(arguments, flag) is not None), "")
    bound = arguments.checkpoint_upper_bound
    if bound is not None and not flag:
        raise ValueError("--checkpoint-upper-bound has no effect without a --num- flag; remove it.")
    if not flag:
        return paths
    if len(paths) != 1 or not paths[0].is_dir():
        raise ValueError(f"{flag_of(flag)} needs one folder, but INPUTS is {' '.join(map(str, paths))}.")
    name, pattern = NAMES[flag]
    count, found = getattr(arguments, flag), []
    for path in paths[0].iterdir():
        if (match := re.fullmatch(pattern, path.name)) and not (bound and int(match[1]) > bound):
            found.append((int(match[1]), path))
    if len(found) < count:
        raise ValueError(f"{flag_of(flag)} is {count}, but INPUTS has only {len(found)} files {name}.")
    return [path for _, path in sorted(found, reverse=True)[:count]]
