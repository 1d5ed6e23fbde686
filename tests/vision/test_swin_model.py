"""Tests Swin V2 models that fairseq's build_model creates."""

import argparse
import re

import pytest
import torch
from fairseq import models
from fairseq.dataclass.initialize import add_defaults
from omegaconf import OmegaConf

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.announce import sizes
from fairseq_tutel.plugin.feed_forward import moe_layers

register()


def build(arch, channels=1, num_classes=10, **options):
    """Build a model for images with `channels` channels in `num_classes` classes."""
    task = argparse.Namespace(cfg=argparse.Namespace(), channels=channels, num_classes=num_classes)
    torch.manual_seed(1)
    return models.build_model(OmegaConf.create({"_name": arch, **options}), task)


# Millions of active parameters of the released models with the 21,841 classes of ImageNet-22K.
PUBLISHED = {"small": 65.8, "base": 109.3}


@pytest.mark.parametrize("size", PUBLISHED)
def test_swin_models_have_the_published_numbers_of_parameters(size):
    with torch.device("meta"):
        dense = build(f"swin_v2_{size}", 3, 21841, swin_form="moe")
        model = build(f"swin_v2_moe_{size}", 3, 21841)
    _, active, *_ = sizes(model)
    assert round(active / 1e6, 1) == PUBLISHED[size]
    gates = sum(layer.gate.weight.numel() for layer in moe_layers(model))
    assert sizes(dense)[0] == active - gates
    labels = [layer.label for layer in moe_layers(model)]
    assert labels == [f"stages_2_{i}" for i in range(1, 18, 2)] + ["stages_3_1"]


def test_linear_layers_of_swin_are_initialized_as_in_the_released_configurations():
    small = {"swin_depths": "1,1", "swin_heads": "1,2", "swin_embed_dim": 32}
    for arch, std, loss in (
        ("swin_v2_moe_small", 0.005, "load_importance_tutel:1"),
        ("swin_v2_moe_base", 0.005, "load_importance_tutel:1"),
        ("swin_v2_moe_tiny", 0.02, "load_importance:1"),
        ("swin_v2_small", 0.02, None),
    ):
        model = build(arch, **small, **({"moe_freq": 1} if loss else {}))
        found = model.stages[0].blocks[0].attn.qkv.weight.std().item()
        assert found == pytest.approx(std, rel=0.1), arch
        if loss:
            assert moe_layers(model)[0].config.balance_loss == loss


def test_swin_blocks_with_experts_are_numbered_within_their_stage():
    model = build("swin_v2_moe_tiny", swin_depths="3,2", moe_expert_count="2,4")
    found = [(layer.label, layer.config.num_experts) for layer in moe_layers(model)]
    assert found == [("stages_0_1", 2), ("stages_1_1", 4)]


@pytest.mark.parametrize("arch", ["swin_v2_tiny", "swin_v2_moe_tiny"])
@pytest.mark.parametrize("size", [(8, 8), (1, 3), (17, 30)])
def test_images_of_any_size_give_gradients_for_every_parameter(arch, size):
    model = build(arch)
    logits = model(torch.randn(3, 1, *size))
    assert logits.shape == (3, 10)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_name_of_a_swin_architecture_sets_model_options_in_hydra():
    cfg = OmegaConf.create({"model": {"_name": "swin_v2_moe_base", "swin_window": 8}})
    add_defaults(cfg)
    found = [cfg.model[key] for key in ("swin_embed_dim", "swin_form", "swin_window", "moe_top_k")]
    assert found == [128, "moe", 8, 1]


@torch.no_grad()
def test_swin_outputs_in_bf16_are_close_to_outputs_in_fp32():
    model, images = build("swin_v2_moe_tiny").eval(), torch.randn(3, 1, 28, 30)
    logits = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(images).float(), logits, rtol=0, atol=2e-3)
    halved = model.bfloat16()(images.bfloat16())
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.float(), logits, rtol=0, atol=2e-3)


def test_gradients_at_padded_positions_are_finite_in_fp16():
    """Attention keys at padded positions are zeros, so the norm in cosine attention is 0."""
    model = build("swin_v2_tiny").half()
    model(torch.randn(2, 1, 22, 34).half()).float().logsumexp(1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_inconsistent_swin_options_are_refused():
    for options, sentence in (
        ({"swin_heads": "1,3"}, "--swin-heads is 1,3; give divisors of 16, 32"),
        ({"swin_depths": "2,2,2"}, "--swin-depths 2,2,2; give one number for each stage"),
        ({"swin_window": 0}, "--swin-window"),
        ({"swin_expert_stages": 0}, "--swin-expert-stages"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            build("swin_v2_moe_tiny", **options)


def test_ensemble_share_after_must_name_an_existing_layer():
    build("ensemble_of", ensemble_share_after="stages.0.blocks.0", ensemble_arch="swin_v2_tiny")
    with pytest.raises(AttributeError, match="has no attribute"):
        build("ensemble_of", ensemble_share_after="stages.7", ensemble_arch="swin_v2_tiny")
