"""Swin V2 as a model of fairseq, built as fairseq builds it.

Covered: sizes as published; which blocks have experts; images of any size; what contradicts itself.
"""

import argparse

import pytest
import torch
from fairseq import models
from omegaconf import OmegaConf

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.announce import sizes
from fairseq_tutel.plugin.feed_forward import moe_layers

register()


def build(arch, channels=1, num_classes=10, **options):
    """Return the model of an architecture, as a task of such images asks for it."""
    task = argparse.Namespace(cfg=argparse.Namespace(), channels=channels, num_classes=num_classes)
    torch.manual_seed(1)
    return models.build_model(OmegaConf.create({"_name": arch, **options}), task)


# Million parameters that an image meets in the released models, at ImageNet-22K's 21,841 classes.
PUBLISHED = {"small": 65.8, "base": 109.3}


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_are_as_published(size):
    with torch.device("meta"):
        dense = build(f"swin_v2_{size}", 3, 21841, swin_form="moe")
        model = build(f"swin_v2_moe_{size}", 3, 21841)
    _, active, _ = sizes(model)
    assert round(active / 1e6, 1) == PUBLISHED[size]
    gates = sum(layer.gate.weight.numel() for layer in moe_layers(model))
    assert sizes(dense)[0] == active - gates
    labels = [layer.label for layer in moe_layers(model)]
    assert labels == [f"stages_2_{i}" for i in range(1, 18, 2)] + ["stages_3_1"]


def test_blocks_with_experts_are_counted_within_a_stage():
    model = build("swin_v2_moe_tiny", swin_depths="3,2", moe_expert_count="2,4")
    found = [(layer.label, layer.config.num_experts) for layer in moe_layers(model)]
    assert found == [("stages_0_1", 2), ("stages_1_1", 4)]


@pytest.mark.parametrize("arch", ["swin_v2_tiny", "swin_v2_moe_tiny"])
@pytest.mark.parametrize("size", [(28, 28), (8, 8), (1, 3), (17, 30)])
def test_images_of_any_size_train_every_parameter(arch, size):
    model = build(arch)
    logits = model(torch.randn(3, 1, *size))
    assert logits.shape == (3, 10)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
