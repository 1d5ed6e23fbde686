"""Swin V2 as a model of fairseq, built as fairseq builds it."""

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
    _, active, *_ = sizes(model)
    assert round(active / 1e6, 1) == PUBLISHED[size]
    gates = sum(layer.gate.weight.numel() for layer in moe_layers(model))
    assert sizes(dense)[0] == active - gates
    labels = [layer.label for layer in moe_layers(model)]
    assert labels == [f"stages_2_{i}" for i in range(1, 18, 2)] + ["stages_3_1"]


def test_linear_layers_begin_as_the_released_configurations_say():
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


def test_blocks_with_experts_are_counted_within_a_stage():
    model = build("swin_v2_moe_tiny", swin_depths="3,2", moe_expert_count="2,4")
    found = [(layer.label, layer.config.num_experts) for layer in moe_layers(model)]
    assert found == [("stages_0_1", 2), ("stages_1_1", 4)]


@pytest.mark.parametrize("arch", ["swin_v2_tiny", "swin_v2_moe_tiny"])
@pytest.mark.parametrize("size", [(8, 8), (1, 3), (17, 30)])
def test_images_of_any_size_train_every_parameter(arch, size):
    model = build(arch)
    logits = model(torch.randn(3, 1, *size))
    assert logits.shape == (3, 10)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_size_s_name_brings_its_options_under_hydra():
    cfg = OmegaConf.create({"model": {"_name": "swin_v2_moe_base", "swin_window": 8}})
    add_defaults(cfg)
    found = [cfg.model[key] for key in ("swin_embed_dim", "swin_form", "swin_window", "moe_top_k")]
    assert found == [128, "moe", 8, 1]


@torch.no_grad()
def test_half_precision_is_near_single():
    model, images = build("swin_v2_moe_tiny").eval(), torch.randn(3, 1, 28, 30)
    logits = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(images).float(), logits, rtol=0, atol=2e-3)
    halved = model.bfloat16()(images.bfloat16())
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.float(), logits, rtol=0, atol=2e-3)


def test_empty_positions_train_in_fp16():
    """Their keys are rows of zeros, which have no norm to divide by."""
    model = build("swin_v2_tiny").half()
    model(torch.randn(2, 1, 22, 34).half()).float().logsumexp(1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_what_contradicts_itself_is_refused():
    for options, sentence in (
        ({"swin_heads": "1,3"}, "--swin-heads is 1,3; give divisors of 16, 32"),
        ({"swin_depths": "2,2,2"}, "--swin-depths 2,2,2; give one number for each stage"),
        ({"swin_window": 0}, "--swin-window"),
        ({"swin_expert_stages": 0}, "--swin-expert-stages"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            build("swin_v2_moe_tiny", **options)


def test_members_share_features_after_a_layer_that_they_have():
    build("ensemble_of", ensemble_share_after="stages.0.blocks.0", ensemble_arch="swin_v2_tiny")
    with pytest.raises(AttributeError, match="has no attribute"):
        build("ensemble_of", ensemble_share_after="stages.7", ensemble_arch="swin_v2_tiny")
