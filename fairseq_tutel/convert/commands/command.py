"""convert: convert a checkpoint from or to another system, or to a different kind of model."""

from typing import Any

from fairseq_tutel.convert.commands import experts, formats, models, released


def add_to(tools: Any) -> None:
    """Add the tool `convert` and all of its subcommands to the command line."""
    example = "sharded SAVE/checkpoint_best.pt --output SAVE/sharded.pt"
    parser = tools.add_parser("convert", description=__doc__, example=example)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for conversion in (*models.KINDS, *experts.KINDS, *formats.KINDS, *released.KINDS):
        conversion.add_to(kinds)
