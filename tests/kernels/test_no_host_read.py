"""An evaluation step on one rank reads nothing from the GPU on the host, so that a CUDA graph can hold it.

Tensors pretend to be on a GPU, so every choice by device is a GPU's. The computation runs on the CPU with
interpreted kernels.
"""

from unittest import mock

import pytest
import torch
from compare import close
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fairseq_tutel import MoEConfig, Topology
from fairseq_tutel.kernels import opaque
from fairseq_tutel.moe import layer as walk
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

pytest.importorskip("triton")

READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "repeat_interleave")
# What torch's bindings ask the device for before they dispatch.
BOUND = (Tensor.__getitem__, Tensor.__setitem__, Tensor.__invert__, Tensor.contiguous, torch.where)


class OnGPU(Tensor):
    """A tensor of the CPU that says it is on a GPU; torch itself refuses its `tolist` and `numpy`."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor):
        tensor = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device="cuda:0"
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None)
        assert not any(name in str(op) for name in READS), f"{op} reads"
        assert device is None or device.type == "cuda", f"{op} copies to the host"
        return held(op, args, kwargs)


def held(function, args, kwargs):
    args, kwargs = tree_map_only(OnGPU, lambda tensor: tensor.held, (args, kwargs))
    return tree_map_only(Tensor, OnGPU, function(*args, **kwargs))


class GPU(TorchFunctionMode):
    """Makes what is asked for on the GPU, and does what a build without CUDA cannot dispatch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in BOUND:
            leaves = [leaf for leaf in tree_leaves(args[1:2]) if isinstance(leaf, Tensor)]
            is_mask = any(leaf.dtype == torch.bool for leaf in leaves)
            assert not is_mask, "a mask as an index reads"
            assert function is not torch.where or len(args) == 3, "where(mask) reads"
            return held(function, args, kwargs)
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda" and not any(isinstance(a, OnGPU) for a in args):
            assert function is not torch.tensor, "a copy from the host waits"
            return held(function, args, {**kwargs, "device": "cpu"})
        return function(*args, **kwargs)


def build(top_k: int) -> MoEFeedForward:
    config = MoEConfig(model_dim=6, hidden_dim=7, num_experts=4, top_k=top_k)
    return MoEFeedForward(config, Topology(), 1, "decoder.layers.0.fc1").eval()


def step(layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    layer.begin_micro_batch()
    layer.begin_call(mask, generates=True)
    return layer(x)


@torch.no_grad()
def run_steps() -> None:
    for top_k, tokens, is_padded in ((1, 1, False), (2, 1, False), (2, 5, False), (2, 5, True)):
        x = torch.randn(1, tokens, 6, generator=torch.Generator().manual_seed(3))
        mask = (torch.arange(tokens) == 1).unsqueeze(1) if is_padded else None
        layer = build(top_k)
        expected = step(layer, x, mask)
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                moved = nn.Parameter(OnGPU(parameter.data), requires_grad=False)
                module._parameters[name] = moved
        x, mask = OnGPU(x), None if mask is None else OnGPU(mask)
        with GPU(), mock.patch.object(opaque, "FakeTensor", OnGPU):
            close(step(layer, x, mask).held, expected, "y")
            few = mock.patch.object(walk, "are_few", lambda *_: True)
            with few, pytest.raises(RuntimeError, match="tolist"):
                step(layer, x, mask)


def test_an_evaluation_step_reads_nothing_on_the_host(interpreter):
    interpreter.run(run_steps)
