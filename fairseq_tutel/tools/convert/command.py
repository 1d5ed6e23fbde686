"""convert: convert a checkpoint from or to another system, or to a different kind of model."""

from typing import Any

from fairseq_tutel.tools.arguments import LateParser
from fairseq_tutel.tools.convert import experts, formats, models, released


def add_to(tools: Any) -> None:
    """Add the tool `convert` and all of its subcommands to the command line."""
    parser = tools.add_parser(
        "convert", help="convert checkpoints from and to other systems and models", description=__doc__
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=LateParser)
    for conversion in (*models.KINDS, *experts.KINDS, *formats.KINDS, *released.KINDS):
        conversion.add_to(kinds)
