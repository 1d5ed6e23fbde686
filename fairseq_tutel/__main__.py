"""fairseq-tutel: tools for training runs and checkpoints of Mixture-of-Experts models.

`fairseq-tutel TOOL --help` explains a tool. `python -m fairseq_tutel` also runs the tools.
"""

import argparse
import os
import sys
from importlib import import_module

from fairseq_tutel import __version__
from fairseq_tutel.files import error_line
from fairseq_tutel.tools.parser import ToolParser

# This table maps each tool to its module and one line of help. Only the module of the chosen tool is
# imported. A tool's module has a function `add_to(tools)`, which adds a subparser. The subparser's default
# `run` is a function of the parsed arguments, which raises ValueError with one sentence on failure. A
# tool's module must not import torch or numpy at its top, so that --help is fast.
GROUPS = {
    "see a training run": {
        "report": ("tools.report.page", "draw one HTML page of training runs, from fairseq's logs"),
        "tokens": ("tools.tokens.page", "draw which experts tokens go to"),
        "inspect": ("tools.inspect_checkpoint", "print what a checkpoint holds"),
    },
    "use a model": {
        "translate": ("tools.generation", "translate lines of text"),
        "sample": ("tools.generation", "continue lines of text with a language model"),
        "score": ("tools.generation", "print a language model's scores of lines of text"),
        "predict": ("tools.predict", "write a model's classes of images"),
    },
    "change checkpoints": {
        "convert": ("convert.command", "convert checkpoints from and to other systems and models"),
        "average": ("tools.average", "average checkpoints"),
    },
    "find a flag, report a bug": {
        "flags": ("tools.flags", "print the options, or those that match a word"),
        "env": ("tools.env", "print versions, devices and backends"),
        "user-dir": ("tools.env", "print the folder to give as --user-dir"),
    },
    "plan for a cluster": {
        "plan": ("tools.plan", "rank configurations of a model's experts on a cluster"),
        "plans": ("tools.plans", "write the collective plans of a training run"),
        "plan-check": ("tools.plans", "check a collective plan"),
        "schedule": ("tools.schedule", "make the fastest plan of a collective for a network"),
    },
}
TOOLS = {name: tool for group in GROUPS.values() for name, tool in group.items()}


def main() -> None:
    """Run the tool given on the command line."""
    words = sys.argv[1:]
    chosen = next((word for word in words if not word.startswith("-")), "")
    parser = parser_of(chosen)
    arguments = parser.parse_args(words)
    if not chosen:
        parser.print_help()
        return
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has closed the pipe.
        # Without the redirection, Python would write the remaining output into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ImportError, OSError, ValueError) as error:
        sys.exit(error_line(error))


def parser_of(chosen: str) -> ToolParser:
    """Return the command-line parser with the arguments of the tool `chosen`; "" means no tool."""
    parser = ToolParser(
        prog="fairseq-tutel",
        usage="fairseq-tutel TOOL [arguments]",
        description=f"{__doc__}\n\n{_listed()}",
        example="report SAVE",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fairseq_tutel {__version__}")
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", help=argparse.SUPPRESS, prog="fairseq-tutel")
    if chosen in TOOLS:
        import_module(f"fairseq_tutel.{TOOLS[chosen][0]}").add_to(tools)
    elif chosen:
        parser.error(f"{chosen} is no tool; give one of {', '.join(TOOLS)}")
    return parser


def _listed() -> str:
    """Return a help text that lists the tools by group, with one tool per line."""
    lines = []
    for title, tools in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:12}{text}" for name, (_, text) in tools.items()), ""]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    main()
