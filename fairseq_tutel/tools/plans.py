"""plans: write the usual collective plans of N ranks into a folder, for --moe-collective-plans.

Each plan is the fastest one between ranks of one host for a range of message sizes. Details: docs/plans.md.
"""

import argparse
from typing import Any

from fairseq_tutel.plans.files import MOST, write
from fairseq_tutel.plans.format import COLLECTIVES
from fairseq_tutel.plans.generators import usual
from fairseq_tutel.tools.arguments import at_least, writing
from fairseq_tutel.tools.parser import add_output


def add_to(tools: Any) -> None:
    """Add this tool as a subcommand of `python -m fairseq_tutel`."""
    parser = tools.add_parser("plans", description=__doc__, example="2 4 --output plans")
    text = "number of ranks in a group"
    parser.add_argument("ranks", type=at_least(2, MOST), nargs="+", metavar="N", help=text)
    add_output(parser, "a new or empty folder for the plans", required=True, is_folder=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Make the usual collective plans for N ranks, and write them to the output folder."""
    folder = arguments.output
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not arguments.overwrite)):
        raise ValueError(
            f"--output is {folder}, which is not an empty folder; give a new folder, or add --overwrite to "
            "write into a folder of plans."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for ranks in sorted(set(arguments.ranks)):
        for plan in (plan for collective in COLLECTIVES for plan in usual(collective, ranks)):
            path = folder / f"{plan.name.replace(' ', '_')}_{ranks}.json"
            with writing(path) as file:
                write(plan, file)
            most = "any" if plan.max_bytes is None else plan.max_bytes
            print(f"wrote {path}: {plan.min_bytes} to {most} bytes")
