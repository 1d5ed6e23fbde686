"""convert: write a checkpoint anew: from or to another system, or another kind of model."""

from importlib import import_module
from typing import Any

from fairseq_tutel.tools.arguments import LateParser

# Each is a module with `add_to(kinds)`, which adds its options and, as their default `convert`, a function
# of the parsed arguments that raises ValueError where the conversion cannot be done.
KINDS = (
    "sharded",
    "upcycle",
    "fewer_experts",
    "student",
    "pregate",
    "dense",
    "members",
    "meta",
    "tutel",
    "swin",
    "safetensors_folder",
)


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "convert",
        help="convert checkpoints from and to other systems and models",
        description=__doc__,
    )
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="KIND", parser_class=LateParser
    )
    for kind in KINDS:
        import_module(f"fairseq_tutel.convert.{kind}").add_to(kinds)
    parser.set_defaults(run=lambda arguments: arguments.convert(arguments))
