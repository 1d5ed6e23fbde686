"""The depth of the call stack from `MoELayer.forward` to an expert's product, which a traceback shows."""

import dataclasses
import sys

import pytest
import torch

from fairseq_tutel import MoEConfig, MoELayer, Strategy, make_topology

CONFIG = MoEConfig(model_dim=16, hidden_dim=32, num_experts=4, top_k=2)
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul"}
MOST = 16


def frames_to_the_product(layer: MoELayer, num_tokens: int, graph: bool) -> int:
    """Return the largest number of Python frames from `forward` to a product of the experts."""
    stacks = []

    def note(frame, event, function):
        if event != "c_call" or getattr(function, "__name__", "") not in PRODUCTS:
            return
        stack = [frame.f_code]
        while stack[-1] is not MoELayer.forward.__code__ and frame.f_back is not None:
            frame = frame.f_back
            stack.append(frame.f_code)
        if stack[-1] is MoELayer.forward.__code__:
            # torch.compile adds a frame once something has imported it.
            stacks.append([code for code in stack if "_dynamo" not in code.co_filename])

    x = torch.ones(num_tokens, CONFIG.model_dim)
    with torch.set_grad_enabled(graph):
        layer(x)
        sys.setprofile(note)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    return max(map(len, stacks))


@pytest.mark.parametrize("options", ({}, {"prescore": True}, {"hidden_layer_norm": True}), ids=str)
def test_a_training_step_is_shallow(options):
    layer = MoELayer(dataclasses.replace(CONFIG, **options), seed=1)
    assert frames_to_the_product(layer, 64, graph=True) <= MOST


@pytest.mark.parametrize("num_tokens", (1, 512))
def test_so_is_an_evaluation(num_tokens):
    layer = MoELayer(CONFIG, seed=1).eval()
    assert frames_to_the_product(layer, num_tokens, graph=False) <= MOST - 2


def across_ranks(strategy):
    layer = MoELayer(CONFIG, make_topology([4], 2), seed=1)
    layer.follow(strategy)
    return frames_to_the_product(layer, 64, graph=True)


@pytest.mark.parametrize("overlap", (1, 2))
def test_so_is_an_exchange(ranks, overlap):
    assert max(ranks(2).run(across_ranks, Strategy(overlap=overlap))) <= MOST
