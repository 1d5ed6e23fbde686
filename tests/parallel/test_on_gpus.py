"""The tests run layers, training and saves on four simulated GPUs, and check host waits and collectives."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from python_gpu import WITHOUT_GPU, Device, gpu
from torch import nn
from torch.utils._pytree import tree_leaves
from training import Training, train, train_in_partitions

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.checkpoint.experts import (
    drop_everywhere,
    gather_everywhere,
    gather_to_first,
    save_in_shards,
)
from fairseq_tutel.checkpoint.shards import bind
from fairseq_tutel.parallel import call_id
from fairseq_tutel.parallel.gradients import mark_expert, reduce_expert_gradients
from fairseq_tutel.parallel.guard import CommunicationError
from fairseq_tutel.parallel.zero_state import ZeroState

RANKS = 4
pytestmark = WITHOUT_GPU


def on_rank(function, *args):
    """Call function(device, *args) on the CPU and on a GPU, and compare the results in fp64.

    Return the second result of the function and the log of collectives.
    """
    expected, _ = function(Device("cpu"), *args)
    call_id._pending.clear()
    with gpu(dist.get_rank()) as device:
        found, facts = function(device, *args)
        for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
            torch.testing.assert_close(other.cpu(), one, rtol=1e-12, atol=1e-12)
        assert device.contexts == {device.index}  # No thread uses the GPU of another rank.
        return facts, device.log


def run(ranks, function, *args):
    """Run a function on the GPUs of all ranks, and return the results of all ranks and rank 0's log.

    Each pair of ranks must start the collectives of their common groups in the same order.
    """
    results, logs = zip(*ranks(RANKS, on_gpus=True).run(on_rank, function, *args), strict=True)
    for pair in itertools.combinations(range(RANKS), 2):
        one, other = (
            [(c.name, c.ranks, c.name == "all_to_all_single" or c.numel) for c in logs[rank]
             if {*pair} <= {*c.ranks}]
            for rank in pair
        )  # fmt: skip
        assert one == other, pair
    return results, logs[0]


# Each entry has a layer's options, the number of ranks per node, and the EP size.
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
    """Return the results of a layer, and the waits of the host in the forward and in the backward pass."""
    config = MoEConfig(**{"model_dim": 8, "hidden_dim": 8, "num_experts": 4, **options})
    topology = make_topology([config.num_experts], size, local)
    layer = MoELayer(config, topology, seed=1).double().to(device.name)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(9 + dist.get_rank(), 8, generator=generator, dtype=torch.float64).to(device.name)
    x.requires_grad_()
    device.waits.clear()
    y, output = layer(x)
    forward = list(device.waits)
    (y.square().sum() + output.balance_loss).backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [y, gradients], (forward, device.waits[len(forward) :])


@pytest.mark.parametrize("form", FORMS)
def test_the_host_waits_for_one_small_copy_in_the_forward_pass_and_never_in_the_backward_pass(ranks, form):
    for forward, backward in run(ranks, layer_step, *FORMS[form])[0]:
        # With adaptive_r 0, the kernels in plain torch need this copy, but Triton kernels would not.
        ((what, numel),) = forward
        assert what == "to the host" and numel <= 24
        assert backward == []


# Each entry has the options of a training run, the ZeRO stage, and whether the optimizer is offloaded.
TRAININGS = {
    "linear": (Training("sgd", 2, 0.0),),
    "gathered, bias": (Training("sgd", 1, 0.5, layout="four, gathered", bias=True),),
    "padded chunks": (Training("adamw", 2, 0.0, layout="four", way="chunks", exchange="padded"),),
    "nodes, slices": (Training("sgd", 2, 0.0, layout="slices, r 1", way="nodes", beside="shared"),),
    "recomputed": (Training("sgd", 2, 0.0, layout="slices, r 2", recompute="non-reentrant"),),
    "experts choose": (Training("sgd", 2, 0.0, layout="slices, r 0", choice="experts", prescore=True),),
    "pregated, stage 1": (Training("adamw", 2, 0.0, beside="cmr", pregate=1), 1, False),
    "each, stage 2":
        (Training("adamw", 1, 0.0, layout="four on every rank", recompute="reentrant"), 2, False),
    "replicas, stage 2, offload":
        (Training("adamw", 1, 0.0, layout="four, two replicas", bias=True), 2, True),
    "slices, stage 2":
        (Training("sgd", 2, 0.0, layout="slices, r 1", way="chunks", recompute="non-reentrant"), 2, False),
}  # fmt: skip


def trained(device, training, *zero):
    if device.name == "cpu":
        return [], None
    way = train_in_partitions if zero else train
    result = way(training, *zero, updates=1, device=device.name)
    return [], {key: tensor.cpu() for key, tensor in result.items()}


@pytest.mark.parametrize("name", TRAININGS)
def test_training_on_several_gpus_equals_training_on_one_cpu_rank(ranks, name):
    found = run(ranks, trained, *TRAININGS[name])[0][0]
    for key, expected in train(TRAININGS[name][0], updates=1).items():
        torch.testing.assert_close(found[key], expected, rtol=1e-10, atol=1e-10, msg=key)


def gradients_of_experts(device):
    """Return reduced expert gradients, where one gradient is missing on one rank."""
    parameters = [nn.Parameter(torch.ones(3, n, device=device.name)) for n in (2, 5, 4)]
    for number, parameter in enumerate(parameters):
        mark_expert(parameter)
        if (number, dist.get_rank()) != (1, 3):
            parameter.grad = torch.full_like(parameter, number + dist.get_rank())
    topology = make_topology([2])
    reduce_expert_gradients(parameters, topology)
    return [parameter.grad for parameter in parameters], None


def test_expert_gradients_are_all_reduced_in_one_bucket(ranks):
    _, log = run(ranks, gradients_of_experts)
    sums = [(len(c.ranks), c.numel) for c in log if c.name == "all_reduce"]
    assert sums == [(2, 33)]


def backward_of_stage_2(device, completes):
    """Return the peak memory that the backward pass adds, as a number of weight matrices."""
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))).to(device.name)
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(dist.get_rank() / 16)
    weight = layers[0].weight.nbytes
    zero = ZeroState(list(layers.parameters()), make_topology([4], 1), 2, bucket_bytes=weight)
    loss = layers(torch.ones(1, 16, device=device.name)).sum()
    device.completes, device.peak, before = completes, device.allocated, device.allocated
    loss.backward()
    more = (device.peak - before) / weight
    zero.reducer.finish_backward()
    return [bucket.gradient for bucket in zero.buckets], more


@pytest.mark.parametrize("completes", [True, False])
def test_zero_stage_2_frees_gradients_even_if_the_host_runs_ahead_of_collectives(ranks, completes):
    for more in run(ranks, backward_of_stage_2, completes)[0]:
        # At most two complete gradients and this rank's part of 8 gradients exist.
        assert more < 2 + 8 / RANKS


def gathered_and_saved(device, folder):
    """Return gathered and saved tensors, and the peak of GPU bytes while rank 0 gathers a moment."""
    topology = make_topology([4])
    config = MoEConfig(model_dim=4, hidden_dim=64, num_experts=4)
    layer = MoELayer(config, topology, seed=1).double().to(device.name)
    parameter = layer.experts.fc1_weight
    moment = parameter.detach().cpu() * 2
    device.peak = before = device.allocated
    with mock.patch("fairseq_tutel.checkpoint.experts.GATHERED_BYTES", 8 * RANKS * 8):
        whole = gather_to_first(moment, topology, parameter)
    most = device.peak - before
    records = save_in_shards(layer, topology, lambda parameter: {"moment": parameter.detach() * 3}, folder)
    bind(records, folder / "checkpoint.pt")
    tripled = records["experts", "fc1_weight.moment"].whole()
    zero = ZeroState([layer.gate.weight], topology, 1, offload=True)
    masters = zero.partitions[0].whole(zero.parameters[0].detach())
    assert masters.device.type == "cpu"
    gather_everywhere(layer, topology)
    y, _ = layer.eval()(torch.ones(1, 4, device=device.name, dtype=torch.float64))
    drop_everywhere(layer)
    return [[] if whole is None else [whole], tripled, masters, y], most


def test_a_save_copies_an_offloaded_optimizer_state_through_the_gpu_in_blocks(ranks, tmp_path):
    most, log = run(ranks, gathered_and_saved, tmp_path)
    assert max(most) <= 2 * 8 * 8 * (1 + RANKS)  # Rank 0 holds at most two blocks of each rank.
    assert sum(c.name == "gather" for c in log) == 256 // 8


def compared_later(device):
    """Compare call IDs that differ between ranks, and return the waits of the host."""
    ids = torch.arange(RANKS, device=device.name) if device.name != "cpu" else torch.zeros(RANKS)
    call_id.compare_later(ids, "one", dist.group.WORLD)
    assert device.waits == []
    if device.name != "cpu":
        with pytest.raises(CommunicationError, match="could not finish one, because"):
            call_id.compare_later(ids, "another", dist.group.WORLD)
    return [], list(device.waits)


def test_on_a_gpu_the_call_ids_of_a_call_are_checked_at_the_next_call(ranks):
    assert run(ranks, compared_later)[0] == ([("event", 0)],) * RANKS
