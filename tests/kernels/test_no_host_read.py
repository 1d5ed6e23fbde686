"""A layer on one rank never reads GPU values on the host, so a CUDA graph can capture its evaluation.

The tests emulate a GPU in Python, and Triton interprets the kernels.
"""

import contextlib
from unittest import mock

import pytest
import torch
from compare import close
from python_gpu import WITHOUT_GPU, gpu
from torch import Tensor, nn

from fairseq_tutel import MoEConfig, MoELayer, Topology
from fairseq_tutel.moe import layer as walk
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

pytest.importorskip("triton")
pytestmark = WITHOUT_GPU


def step(layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    layer.begin_micro_batch()
    layer.begin_call(mask, generates=True)
    return layer(x)


@torch.no_grad()
def evaluate() -> None:
    for top_k, tokens, is_padded in ((1, 1, False), (2, 1, False), (2, 5, False), (2, 5, True)):
        x = torch.randn(1, tokens, 6, generator=torch.Generator().manual_seed(3))
        mask = (torch.arange(tokens) == 1).unsqueeze(1) if is_padded else None
        config = MoEConfig(model_dim=6, hidden_dim=7, num_experts=4, top_k=top_k)
        layer = MoEFeedForward(config, Topology(), 1, "decoder.layers.0.fc1").eval()
        expected = step(layer, x, mask)
        with gpu() as device:
            layer, x = layer.to(device.name), x.to(device.name)
            mask = None if mask is None else mask.to(device.name)
            device.waits.clear()
            y = step(layer, x, mask)
            assert device.waits == []
            close(y.cpu(), expected, "y")
            device.waits.clear()
            # The decode path reads expert IDs on the host, and then fails, because the emulated GPU cannot
            # index by a list.
            with mock.patch.object(walk, "are_few", lambda *_: True), contextlib.suppress(RuntimeError):
                step(layer, x, mask)
            assert device.waits


def train() -> None:
    layer = MoELayer(MoEConfig(model_dim=6, hidden_dim=7, num_experts=4), seed=1)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    expected = grads_of(layer, x)
    with gpu() as device:
        layer, x = layer.to(device.name), x.to(device.name)
        device.waits.clear()
        found = grads_of(layer, x)
        assert device.waits == []
        for grad, other in zip(found, expected, strict=True):
            close(grad.cpu(), other, "gradient")


def grads_of(layer: MoELayer, x: Tensor) -> list[Tensor]:
    y, output = layer(x)
    return torch.autograd.grad(y.square().sum() + output.balance_loss, list(layer.parameters()))


def test_evaluation_reads_no_gpu_values_on_the_host(interpreter):
    interpreter.run(evaluate)


def test_forward_and_backward_read_no_gpu_values_on_the_host(interpreter):
    interpreter.run(train)
