"""convert pregate: a checkpoint whose gates see the input of an earlier MoE layer, to be fine-tuned so.

No weight changes: a gate stays in the layer whose experts it chooses (inference/pregate.py).
"""

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.checkpoint.saved import Layer, open_moe
from fairseq_tutel.convert.names import model_options

PREGATE = """
convert pregate: let the gate of each MoE layer see the input of the MoE layer N before it in its stack; the
first N see their own. Weights stay as they are, but gates were trained to see something else: fine-tune the
new checkpoint, by --finetune-from-model with --moe-pregate N, before it is used.
"""


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    text = "let gates see the input of an earlier MoE layer"
    parser = add_conversion(
        kinds, "pregate", convert, text, PREGATE, "a conventional checkpoint with experts"
    )
    text = "how many MoE layers earlier"
    parser.add_argument("--moe-pregate", type=int, required=True, metavar="N", help=text)


def convert(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    """Convert as the command line says."""
    file, ahead = open_moe(path), arguments.moe_pregate
    options = model_options(file.state)
    if options.get("moe_pregate"):
        raise ValueError(
            f"--input names {path}, which is pre-gated already (--moe-pregate {options['moe_pregate']}); "
            "give the conventional checkpoint."
        )
    stacks = {side: list(layers) for side, layers in groupby(file.layers, lambda layer: layer.side)}
    refuse_too_far(ahead, {side: len(layers) for side, layers in stacks.items()})
    for layers in stacks.values():
        for place, layer in enumerate(layers):
            print(f"{layer.label}: {_seen(layers, place, ahead)}")
    options["moe_pregate"] = ahead
    file.write(file.model, output)
    print(f"wrote {output}; fine-tune it by --finetune-from-model, with --moe-pregate {ahead}")


def _seen(layers: list[Layer], place: int, ahead: int) -> str:
    if place < ahead:
        return "its gate sees its own input"
    return f"its gate sees the input of {layers[place - ahead].label}"
