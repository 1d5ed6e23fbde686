"""From a stock model to its MoE twin, in this process.

Covered: a model that is pruned to some of its layers takes those of a checkpoint that had all.
"""

import argparse

import pytest
import torch
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_tutel.ffn_step import moe_layers
from fairseq_tutel.plugin import register

register()

SMALL = {
    "decoder": [
        "--task", "moe_language_modeling", "--arch", "moe_transformer_lm", "--decoder-layers", "4",
        "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2",
    ],
    "encoder": ["--task", "moe_translation", "--arch", "moe_transformer_tiny", "--encoder-layers", "4"],
}  # fmt: skip


def build(side, **overrides):
    """Return (model, its configuration); of four layers of a side the second and the last have experts.

    Args:
        side: which one.
        overrides: of the command line, as --model-overrides has them.
    """
    words = ["data", *SMALL[side], "--moe-freq", "2", "--moe-expert-count", "3"]
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    vars(arguments).update(overrides)
    cfg = convert_namespace_to_omegaconf(arguments).model
    task = argparse.Namespace(cfg=argparse.Namespace())
    task.source_dictionary = task.target_dictionary = Dictionary()
    return models.build_model(cfg, task), cfg


@pytest.mark.parametrize("side", SMALL)
@pytest.mark.parametrize(("kept", "with_experts"), [("1,3", [0, 1]), ("0,2,3", [2])])
def test_a_pruned_model_takes_the_layers_that_it_keeps(side, kept, with_experts):
    whole, _ = build(side)
    # Stock drops the layers of a side without the option; the decoder of a translation has two.
    keep = {"decoder_layers_to_keep": "0,1", f"{side}_layers_to_keep": kept}
    pruned, cfg = build(side, **keep)
    labels = [layer.label for layer in moe_layers(pruned) if layer.label.startswith(side)]
    assert labels == [f"{side}_{i}" for i in with_experts]
    pruned.load_state_dict(whole.state_dict(), model_cfg=cfg)
    last = max(map(int, kept.split(",")))
    own = getattr(pruned, side).layers[-1].state_dict()
    for name, tensor in getattr(whole, side).layers[last].state_dict().items():
        assert torch.equal(own[name], tensor), name
