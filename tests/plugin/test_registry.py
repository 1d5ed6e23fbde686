"""What is registered: a twin of every stock architecture and optimizer, and each twin builds."""

import argparse

import pytest
import torch
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.feed_forward import moe_layers

register()

SMALL = {
    "transformer_lm": [
        "--task", "moe_language_modeling", "--criterion", "moe_cross_entropy",
        "--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-input-dim", "32",
        "--decoder-output-dim", "32", "--decoder-ffn-embed-dim", "48", "--decoder-attention-heads", "2",
        "--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20",
    ],
    "transformer": [
        "--task", "moe_translation", "--criterion", "moe_label_smoothed_cross_entropy",
        "--encoder-layers", "2", "--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "48",
        "--encoder-attention-heads", "2", "--decoder-layers", "2", "--decoder-embed-dim", "32",
        "--decoder-ffn-embed-dim", "48", "--decoder-attention-heads", "2",
    ],
}  # fmt: skip
SMALL["roberta"] = [
    "--task", "moe_masked_lm", "--criterion", "moe_masked_lm", *SMALL["transformer"][4:12],
]  # fmt: skip
SMALL["bart"] = SMALL["transformer"]


def _twins(model):
    return ARCH_MODEL_INV_REGISTRY[f"moe_{model}"]


@pytest.mark.parametrize("model", SMALL)
def test_every_stock_architecture_has_a_twin(model):
    assert {f"moe_{arch}" for arch in ARCH_MODEL_INV_REGISTRY[model]} == set(_twins(model))
    assert len(_twins(model)) >= 5


class _Task:
    """As much of a task as a model needs while it is built outside a training."""

    def __init__(self):
        self.source_dictionary = self.target_dictionary = Dictionary()
        for i in range(40):
            self.source_dictionary.add_symbol(f"w{i}")
        self.cfg = argparse.Namespace()


@pytest.mark.parametrize("model", SMALL)
def test_every_twin_builds_and_runs(model):
    for arch in _twins(model):
        words = [
            "data",
            "--arch",
            arch,
            "--moe-freq",
            "1",
            "--moe-expert-count",
            "3",
            *SMALL[model],
        ]
        parser = options.get_training_parser()
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
        built = models.build_model(cfg.model, _Task())
        one_sided = model in ("transformer_lm", "roberta")
        assert len(moe_layers(built)) == (2 if one_sided else 4), arch
        tokens = torch.arange(4, 14).view(2, 5)
        inputs = (tokens,) if one_sided else (tokens, torch.tensor([5, 5]), tokens)
        features, _ = built(*inputs)
        features.sum().backward()
        assert all(m.experts.fc1_weight.grad is not None for m in moe_layers(built)), arch


def test_every_stock_optimizer_has_a_twin():
    stock = {name for name in OPTIMIZER_REGISTRY if not name.startswith("moe_")}
    assert {f"moe_{name}" for name in stock} <= set(OPTIMIZER_REGISTRY)
    assert "adam" in stock


def test_registering_twice_changes_nothing():
    before = len(ARCH_MODEL_REGISTRY), len(OPTIMIZER_REGISTRY)
    register()
    assert (len(ARCH_MODEL_REGISTRY), len(OPTIMIZER_REGISTRY)) == before


def test_tasks_and_criterions_are_choices_of_the_command_line():
    choices = {a.dest: a.choices for a in options.get_training_parser()._actions}
    tasks = {"moe_language_modeling", "moe_translation", "moe_masked_lm", "moe_denoising"}
    assert tasks <= set(choices["task"])
    names = {"moe_cross_entropy", "moe_label_smoothed_cross_entropy", "moe_masked_lm"}
    assert names <= set(choices["criterion"])
    assert "moe_adam" in choices["optimizer"]
