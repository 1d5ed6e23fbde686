"""Training with ZeRO or offload equals plain training, and its memory is as `held_bytes` predicts."""

import dataclasses
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import Training, train, train_in_partitions
from uneven import backward, gradient_of, some_parameters

from fairseq_tutel import make_topology
from fairseq_tutel.parallel.cost import Held, held_bytes
from fairseq_tutel.parallel.gradients import mark_expert
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.zero_state import MASTER, ZeroState

UPDATES = 4


@functools.cache
def on_one_rank(training):
    return train(training, UPDATES)


TRAININGS = {
    "four": Training("adamw", 2, 0.0, layout="four"),
    "replicas": Training("sgd", 2, 0.5, layout="four, two replicas", beside="shared", bias=True),
}
TRAININGS["planned"] = dataclasses.replace(TRAININGS["replicas"], way="plans")
CASES = [
    # The file test_on_gpus.py tests other combinations.
    ("four", 1, 2, False),
    ("four", 1, 0, True),
    ("replicas", 4, 1, True),
    ("planned", 4, 2, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "world_size", "stage", "offload"), CASES)
def test_training_with_zero_partitions_equals_training_on_one_rank(ranks, name, world_size, stage, offload):
    training = TRAININGS[name]
    expected = on_one_rank(training)
    arguments = (training, stage, offload)
    if world_size == 1:
        results = [train_in_partitions(*arguments)]
    else:
        results = ranks(world_size).run(train_in_partitions, *arguments)
    for key, tensor in expected.items():
        close = {"rtol": 1e-10, "atol": 1e-10, "msg": f"{key}"}
        torch.testing.assert_close(results[0][key], tensor, **close)
    for other in results[1:]:
        assert torch.equal(other["norms"], results[0]["norms"])  # All ranks have bit-identical norms.


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-20)


def train_half(dtype, stage, offload, scale):
    """Train half-precision parameters with scaled gradients of two ranks, and return the weights."""
    distributed = dist.is_initialized()
    place = make_topology([4], 1) if distributed else Topology()
    parameters = some_parameters(dtype)
    zero = ZeroState(parameters, place, stage, offload, bucket_bytes=100)
    optimizer = adam(zero.parameters)
    for update in range(3):
        zero.zero_grad()
        for number, parameter in enumerate(parameters):
            of = range(2) if place.world_size == 1 else [place.rank]
            grads = [gradient_of(parameter, number + 10 * update, r) for r in of]
            parameter.grad = sum(grad / 2 for grad in grads) if len(grads) == 2 else grads[0]
        if stage == 2:
            for partition in zero.partitions:
                zero.reducer.arrived(partition.parameter, bucket_number(zero, partition))
            zero.reducer.finish_backward()
        zero.reducer.reduce()
        zero.multiply(1 / scale)
        zero.clip(2.0 / scale)
        zero.step(optimizer, optimizer.step)
    return [p.data for p in parameters]


def bucket_number(zero, partition):
    return next(i for i, b in enumerate(zero.reducer.shared) if partition in b.partitions)


def fp32_copies_by_hand(dtype, scale):
    """Train fp32 masters of complete parameters, like fairseq's FP16Optimizer, and return the weights."""
    parameters = some_parameters(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = adam(masters)
    for update in range(3):
        for number, (parameter, master) in enumerate(zip(parameters, masters, strict=True)):
            grads = [gradient_of(parameter, number + 10 * update, r) for r in range(2)]
            master.grad = sum(grad / 2 for grad in grads).float() / scale
        norm = torch.nn.utils.clip_grad_norm_(masters, 2.0 / scale)
        assert norm > 2 / scale
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master)
    return [p.data for p in parameters]


@pytest.mark.parametrize(
    ("dtype", "stage", "offload"), [(torch.bfloat16, 1, False), (torch.float16, 2, True)]
)
def test_half_precision_training_equals_training_of_complete_fp32_masters(ranks, dtype, stage, offload):
    # If fp16 gradients were divided by this scale, they would be rounded to 0.
    scale = 2.0**30 if dtype == torch.float16 else 1.0
    expected = fp32_copies_by_hand(dtype, scale)
    for weights in ranks(2).run(train_half, dtype, stage, offload, scale):
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-4)
    alone = train_half(dtype, 1, offload, scale)
    for found, wanted in zip(alone, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-4)


class Counting(torch.optim.SGD):
    """Stores a step count and the last learning rate in the parameter group, as apex's Adam does."""

    def step(self, closure=None):
        group = self.param_groups[0]
        self.seen = [*getattr(self, "seen", []), (group.get("step", 0), group.get("old", None))]
        super().step(closure)
        group["step"], group["old"] = group.get("step", 0) + 1, group["lr"]


def test_the_step_count_of_an_offloaded_optimizer_equals_the_number_of_updates():
    parameters = some_parameters()
    zero = ZeroState(parameters, Topology(), 0, offload=True, bucket_bytes=100)
    optimizer = Counting(zero.parameters, lr=0.5)
    for update in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        zero.step(optimizer, optimizer.step)
        optimizer.param_groups[0]["lr"] = 0.25
        assert optimizer.param_groups[0]["step"] == update + 1
        assert len(optimizer.param_groups[0]["params"]) == len(parameters)
        assert optimizer.seen == [(update, [None, 0.5][update])] * len(zero.buckets)
        optimizer.seen = []
    for before, after in zip(some_parameters(), parameters, strict=True):
        torch.testing.assert_close(after, before - 0.75)


def moments(parallel, stage, dtype, offload):
    """Return the optimizer's state after two updates, gathered to complete parameters."""
    place = make_topology([4], parallel) if dist.is_initialized() else Topology()
    parameters = some_parameters(dtype)
    zero = ZeroState(parameters, place, stage, offload, bucket_bytes=100)
    optimizer = adam(zero.parameters)
    for update in range(2):
        zero.zero_grad()
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient_of(parameter, number + 10 * update, 0)
        zero.reducer.reduce()
        zero.step(optimizer, optimizer.step)
    whole = [zero.whole_state(i, optimizer.state[own]) for i, own in enumerate(zero.parameters)]
    cut = [zero.own_state(i, state) for i, state in enumerate(whole)]
    for own, state in zip(zero.parameters, cut, strict=True):
        for key, value in optimizer.state[own].items():
            assert torch.equal(value, state[key]), key
        assert (MASTER in state) == (dtype == torch.bfloat16)
        assert torch.equal(state.get(MASTER, own.data), own.data)
    return whole


@pytest.mark.parametrize(("parallel", "stage", "dtype", "offload"), [
    (1, 1, torch.float64, False), (2, 1, torch.bfloat16, True), (2, 0, torch.bfloat16, True),
])  # fmt: skip
def test_optimizer_state_can_be_gathered_and_partitioned_again(ranks, parallel, stage, dtype, offload):
    expected = moments(1, 0, dtype, True)
    # All ranks have equal gradients. Expert gradients are sums over EP replicas, divided by 4.
    for whole in ranks(4).run(moments, parallel, stage, dtype, offload):
        for number, (found, wanted) in enumerate(zip(whole, expected, strict=True)):
            assert found.keys() == wanted.keys()
            share = 1.0 if number not in (4, 5) or stage == 0 else 1 / parallel
            for key, factor in (("exp_avg", share), ("exp_avg_sq", share**2), (MASTER, 1.0)):
                if key in wanted:
                    close = {"rtol": 1e-2, "atol": 1e-7} if dtype == torch.bfloat16 else {}
                    torch.testing.assert_close(found[key], factor * wanted[key], **close)
            assert found["step"] == 2


def test_fp32_masters_of_a_half_precision_run_become_the_weights_of_an_fp32_run():
    parameters = some_parameters(torch.float32)
    zero = ZeroState(parameters, Topology(world_size=4, rank=3), 1)
    saved = torch.full((5, 7), 1.0 + 2.0**-20)
    own = zero.own_state(0, {MASTER: saved, "step": 3})
    assert torch.equal(parameters[0].data, saved)  # Every rank has the complete parameter.
    assert torch.equal(own[MASTER], saved.view(-1)[27:])
    assert own["step"] == 3


def bytes_of(tensors):
    """Return the bytes of tensors; memory that several tensors share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


EVEN = {"dense": [(8, 16), (16,), (4,)], "experts": [(2, 4, 8), (2, 4)]}


def held(parallel, stage, offload, dtype):
    """Return this rank's bytes after a backward pass, and the gradient bytes after the reduction."""
    place = make_topology([4], parallel) if dist.is_initialized() else Topology()
    parameters = [nn.Parameter(torch.ones(s, dtype=dtype)) for s in EVEN["dense"] + EVEN["experts"]]
    for parameter in parameters[3:] if parallel > 1 else ():
        mark_expert(parameter)
    zero = ZeroState(parameters, place, stage, offload, bucket_bytes=200)
    optimizer = adam(zero.parameters)
    for _ in range(2):
        zero.zero_grad()
        backward(parameters, 0)
        zero.reducer.finish_backward()
        after_backward = gradient_bytes(zero)
        zero.reducer.reduce()
        reduced = gradient_bytes(zero)
        zero.step(optimizer, optimizer.step)
        assert gradient_bytes(zero) == 0
    moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    copies = [partition.own.data for partition in zero.partitions if not partition.is_view]
    state = bytes_of(moments + copies)
    assert all(t.device.type == "cpu" for t in moments + copies)
    weights = bytes_of([p.data for p in parameters])
    return Held(weights, after_backward, 0 if offload else state, state if offload else 0), reduced


def gradient_bytes(zero):
    found = [p.parameter.grad for p in zero.partitions] + [b.gradient for b in zero.buckets]
    return bytes_of([t for t in found if t is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("parallel", "stage", "offload"), [
    (2, 1, False), (2, 2, False), (1, 2, True),
])  # fmt: skip
def test_the_memory_of_a_rank_that_uses_zero_equals_the_formula(ranks, parallel, stage, offload, dtype):
    sizes = {kind: [math.prod(s) for s in shapes] for kind, shapes in EVEN.items()}
    if parallel == 1:
        sizes = {"dense": sizes["dense"] + sizes["experts"], "experts": []}
    wide = dtype.itemsize
    expected = held_bytes(
        **sizes, world_size=4, expert_parallel_size=parallel, stage=stage, offload=offload,
        weight_bytes=wide,
    )  # fmt: skip
    reduced = held_bytes(
        **sizes, world_size=4, expert_parallel_size=parallel, stage=min(2, 2 * stage),
        offload=offload, weight_bytes=wide,
    )  # fmt: skip
    for found, gradients in ranks(4).run(held, parallel, stage, offload, dtype):
        assert found == expected
        assert gradients == reduced.gradients
