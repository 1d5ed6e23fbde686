"""Layers, trainings and saves on the GPUs of four ranks: results, order of collectives, waits of the host."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from python_gpu import Device, gpu
from torch.utils._pytree import tree_leaves

from fairseq_tutel import MoEConfig, MoELayer, kernels, make_topology

RANKS = 4


def on_rank(function, *args):
    """Compare function(device, *args) on the CPU with the same on a GPU, in fp64.

    Returns its second result, and the log of the collectives.
    """
    expected, _ = function(Device("cpu"), *args)
    without_triton = mock.patch.object(kernels, "_lacks_triton", lambda: "it cannot run in these processes")
    with without_triton, gpu(dist.get_rank()) as device:
        found, facts = function(device, *args)
        for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
            torch.testing.assert_close(other.cpu(), one, rtol=1e-12, atol=1e-12)
        return facts, device.log


def run(ranks, function, *args):
    """Run a function on the GPUs of all ranks; each pair must order the collectives that it shares alike."""
    results, logs = zip(*ranks(RANKS, on_gpus=True).run(on_rank, function, *args), strict=True)
    for pair in itertools.combinations(range(RANKS), 2):
        one, other = (
            [(c.name, c.ranks, c.name == "all_to_all_single" or c.numel) for c in logs[rank]
             if {*pair} <= {*c.ranks}]
            for rank in pair
        )  # fmt: skip
        assert one == other, pair
    return results, logs[0]


# The options of a layer, ranks of a node, P.
FORMS = {
    "linear": ({}, 0, 0),
    "bf16": ({"a2a_dtype": "bf16"}, 0, 2),
    "fp8, in chunks": ({"a2a_dtype": "fp8", "a2a_ffn_overlap_degree": 2}, 0, 2),
    "padded": ({"exchange": "padded"}, 0, 0),
    "padded, in chunks": ({"exchange": "padded", "a2a_ffn_overlap_degree": 2}, 0, 0),
    "in chunks": ({"a2a_ffn_overlap_degree": 2, "prescore": True}, 0, 0),
    "2dh": ({"a2a_algorithm": "2dh"}, 2, 0),
    "2dh, padded, in chunks":
        ({"a2a_algorithm": "2dh", "exchange": "padded", "a2a_ffn_overlap_degree": 2}, 2, 0),
    "r 0": ({"adaptive_r": 0}, 0, 0),
    **{f"slices, r {r}": ({"num_experts": 1, "top_k": 1, "adaptive_r": r}, 0, 4) for r in (0, 1, 2, 4)},
}  # fmt: skip


def layer_step(device, options, local, size):
    """Return the results of a layer, and what the host waits for in forward and in backward."""
    config, rank = MoEConfig(**{"model_dim": 8, "hidden_dim": 8, "num_experts": 4, **options}), dist.get_rank()
    topology = make_topology([config.num_experts], size, local)
    layer = MoELayer(config, topology, seed=1).double().to(device.name)
    x = torch.randn(9 + rank, 8, generator=torch.Generator().manual_seed(rank)).double().to(device.name)
    x.requires_grad_()
    device.waits.clear()
    y, output = layer(x)
    forward = list(device.waits)
    (y.square().sum() + output.balance_loss).backward()
    backward = device.waits[len(forward):]  # fmt: skip
    return [y, x.grad, *(parameter.grad for parameter in layer.parameters())], (forward, backward)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_waits_once_in_forward_and_never_in_backward(ranks, form):
    results, _ = run(ranks, layer_step, *FORMS[form])
    for forward, backward in results:
        print(forward, backward)
    assert 0
