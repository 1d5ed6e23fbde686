"""user-dir: print the directory to give fairseq as --user-dir."""

import argparse
from pathlib import Path
from typing import Any


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "user-dir", help="print the directory to give fairseq as --user-dir", description=__doc__
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the package's directory."""
    print(Path(__file__).resolve().parents[1])
