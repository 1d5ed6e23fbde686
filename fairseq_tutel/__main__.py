"""`python -m fairseq_tutel TOOL`: command-line tools for training runs and checkpoints."""

import argparse
import os
import sys
from importlib import import_module

from fairseq_tutel import __version__
from fairseq_tutel.files.untrusted import error_line

# Modules of tools/. Each has a function `add_to(tools)`, which adds a subparser with the default `run`.
# `run` is called with the parsed arguments and raises ValueError with a one-sentence message on failure.
TOOLS = (
    "average", "convert.command", "env", "flags", "inspect_checkpoint", "plan", "plan_check", "plans",
    "predict", "report.page", "schedule", "tune",
)  # fmt: skip


def main() -> None:
    """Run the tool that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_tutel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fairseq_tutel {__version__}")
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")
    for name in TOOLS:
        import_module(f"fairseq_tutel.tools.{name}").add_to(tools)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `inspect … | head`: the reader has closed the pipe
        # Otherwise Python would write the remaining output into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ImportError, OSError, ValueError) as error:
        sys.exit(error_line(error))


if __name__ == "__main__":
    main()
