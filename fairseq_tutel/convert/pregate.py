"""Sets --moe-pregate in a checkpoint, to be fine-tuned. No weight changes (see inference/pregate.py)."""

from itertools import groupby

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.configs import configs_of
from fairseq_tutel.inference.pregate import refuse_too_far


def pregate(saved: SavedModel, ahead: int) -> list[str]:
    """Let each gate read the input of the MoE layer `ahead` layers earlier, in place.

    Returns:
        A line for each MoE layer with the input that its gate reads.

    Raises:
        ValueError: it is pre-gated already, or has too few MoE layers.
    """
    sides = [list(layers) for _, layers in groupby(configs_of(saved), lambda layer: layer.side)]
    if saved.options.get("moe_pregate"):
        raise ValueError(
            f"--input names {saved.path}, which is pre-gated already (--moe-pregate "
            f"{saved.options['moe_pregate']}); give the conventional checkpoint."
        )
    refuse_too_far(ahead, {layers[0].side: len(layers) for layers in sides})
    lines = []
    for layers in sides:
        for i, layer in enumerate(layers):
            source = "its own input" if i < ahead else f"the input of {layers[i - ahead].label}"
            lines.append(f"{layer.label}: its gate reads {source}")
    saved.options["moe_pregate"] = ahead
    saved.restart()
    return lines
