"""`python -m fairseq_tutel TOOL`: small tools around a training."""

import argparse
import os
import sys
from importlib import import_module

from fairseq_tutel import __version__
from fairseq_tutel.files.small import error_line

# Modules of tools/, each with `add_to(tools)`, which adds a tool and, as its default `run`, a function of
# the parsed arguments that raises ValueError, with a sentence, where it cannot be done.
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
    except BrokenPipeError:  # as of `inspect … | head`: who reads has read enough
        # What is left would be flushed at the end, into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ImportError, OSError, ValueError) as error:
        sys.exit(error_line(error))


if __name__ == "__main__":
    main()
