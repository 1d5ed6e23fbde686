"""`python -m fairseq_tutel TOOL`: small tools around a training."""

import argparse
import os
import sys

from fairseq_tutel import __version__
from fairseq_tutel.tools import average, env, flags, inspect_checkpoint, plan, tune, user_dir
from fairseq_tutel.tools.convert import command
from fairseq_tutel.tools.report import page


def main() -> None:
    """Run the tool that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_tutel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fairseq_tutel {__version__}")
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for tool in (
        average,
        command,
        env,
        flags,
        inspect_checkpoint,
        plan,
        page,
        tune,
        user_dir,
    ):
        tool.add_to(tools)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `inspect … | head`: who reads has read enough
        # What is left would be flushed at the end, into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
