"""inspect: say what a checkpoint holds: experts, shapes, bytes, options, updates, and loads by a log.

It opens ours, dense ones of fairseq, one file of Meta's moe branch or of Tutel, and other files of tensors.
Tensors stay in the file, and no pickled code runs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint.safe_globals import let_checkpoints_load
from fairseq_tutel.tools.convert.files import load_any
from fairseq_tutel.tools.inspected import described
from fairseq_tutel.tools.inspected_text import lines_of


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser("inspect", help="say what a checkpoint holds", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="a checkpoint")
    parser.add_argument(
        "--log",
        metavar="PATH",
        help="add the experts' loads by this log of the training with --log-format json, or by the one in "
        "this --save-dir",
    )
    parser.add_argument(
        "--tensors", action="store_true", help="list the tensors of our own files too"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="read everything, shard files too, and compare it with the check sums",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print what the file holds; end with one sentence where it cannot be read."""
    let_checkpoints_load()
    path = Path(arguments.file)
    try:
        state = load_any(path, "FILE", only_look=True)
        facts = described(state, path, arguments.log, arguments.check)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return
    print("\n".join(lines_of(facts, arguments.tensors)))
