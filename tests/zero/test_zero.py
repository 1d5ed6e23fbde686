"""ZeRO and offload in the core: shards train as whole parameters do, and hold the bytes of the formula.

Covered: fp64 trainings of experts and dense layers against one rank, stages 0 to 2, with and without
offload, experts over all ranks, with replicas, on each, in slices; who owns which element, uneven and tiny
sizes; one order of buckets, unused parameters, several backwards, a gradient in parts, an optimizer built
anew; gradients scaled in fp16, fp32 masters of bf16; NaN on one rank; counts that an optimizer keeps for
all; state whole, cut, and read from a file of any run; bytes of weights, gradients and state.
"""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    CLIP_NORM,
    OPTIMIZERS,
    Model,
    Training,
    average_dense_gradients,
    backward_update,
    outcome,
    place_in_world,
    train,
)

from fairseq_tutel import make_topology
from fairseq_tutel.comm.gradients import mark_expert, mark_root_scaled, reduce_expert_gradients
from fairseq_tutel.moe.balance import update_biases
from fairseq_tutel.planning.memory import Held, held_bytes, partition_length
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.partition import Share, own_elements, partitions_of
from fairseq_tutel.zero.state import MASTER, ZeroState

UPDATES = 8


def train_in_shards(training, stage, offload):
    """Train as `train` does, with an optimizer of shards; return its losses, norms and weights."""
    world, _ = place_in_world()
    place = training.topology()
    model = Model(training, place)
    parameters = list(model.parameters())
    # Buckets of several parameters, some larger than a bucket.
    zero = ZeroState(parameters, place, stage, offload, bucket_bytes=600)
    optimizer = OPTIMIZERS[training.optimizer](zero.parameters)
    losses, norms = [], []
    for update in range(UPDATES):
        zero.zero_grad()
        loss_sum, tokens = backward_update(model, update, zero.finish_backward)
        if stage > 0:
            zero.reduce()
        elif world > 1:
            average_dense_gradients(parameters, world)
            reduce_expert_gradients(parameters, place)
        zero.multiply(world / float(tokens))
        norms.append(zero.clip(CLIP_NORM))
        zero.step(optimizer, optimizer.step)
        update_biases(model)
        losses.append(loss_sum / tokens)
    return outcome(model, place, losses, norms)


@functools.cache
def on_one_rank(training):
    return train(training, UPDATES)


TRAININGS = {
    "four": Training("adamw", 2, 0.0, layout="four"),
    "replicas": Training("sgd", 2, 0.5, layout="four, two replicas", beside="shared", bias=True),
    "each": Training("adamw", 1, 0.0, layout="four on every rank", recompute="reentrant"),
    "slices": Training(
        "sgd", 2, 0.0, layout="slices, r 1", way="chunks", recompute="non-reentrant"
    ),
}
CASES = [
    ("four", 4, 1, False),
    ("four", 4, 2, True),
    ("four", 1, 2, False),
    ("four", 1, 0, True),
    ("replicas", 4, 2, False),
    ("replicas", 4, 1, True),
    ("replicas", 4, 0, True),
    ("replicas", 2, 2, False),
    ("each", 4, 2, False),
    ("each", 2, 1, False),
    ("slices", 4, 2, False),
    ("slices", 2, 1, True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "world_size", "stage", "offload"), CASES)
def test_shards_train_as_one_rank_does(ranks, name, world_size, stage, offload):
    training = TRAININGS[name]
    expected = on_one_rank(training)
    arguments = (training, stage, offload)
    if world_size == 1:
        results = [train_in_shards(*arguments)]
    else:
        results = ranks(world_size).run(train_in_shards, *arguments)
    for key, tensor in expected.items():
        close = {"rtol": 1e-10, "atol": 1e-10, "msg": f"{key}"}
        torch.testing.assert_close(results[0][key], tensor, **close)
    for other in results[1:]:
        assert torch.equal(other["norms"], results[0]["norms"])  # the same bits


def some_parameters(dtype=torch.float64):
    """Parameters of sizes that no number of ranks divides, and of some that two or four do."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (), (3,), (8,), (1, 1), (4, 2, 3), (0,), (13,)]
    made = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]
    for parameter in made[4:6]:
        mark_expert(parameter)
    return made


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_element_has_one_owner(numel, size):
    flat = torch.arange(numel)
    owned = [own_elements(flat, Share(size, index)) for index in range(size)]
    assert torch.cat(owned).tolist() == flat.tolist()
    assert all(len(own) <= partition_length(numel, size) for own in owned)
    assert partition_length(numel, size) * size - numel < size


@pytest.mark.parametrize(("dtype", "offload"), [
    (torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.float16, True),
])  # fmt: skip
def test_a_shard_is_a_view_or_a_wide_copy(dtype, offload):
    parameters = some_parameters(dtype)
    place = Topology(world_size=4, rank=1, expert_parallel_size=2)
    partitions, _ = partitions_of(parameters, place, offload=offload)
    for parameter, partition in zip(parameters, partitions, strict=True):
        own = own_elements(parameter.data, partition.share)
        assert partition.own.dtype == torch.float32
        assert torch.equal(partition.own.data, own.float())
        shared = partition.own.data.untyped_storage().data_ptr() == parameter.data_ptr()
        assert shared == (dtype == torch.float32 and not offload) or parameter.numel() == 0


def test_buckets_hold_parameters_of_one_kind_and_size():
    parameters = some_parameters()
    place = Topology(world_size=4, rank=3, expert_parallel_size=2)
    partitions, buckets = partitions_of(parameters, place, bucket_bytes=100)
    in_buckets = [partition for bucket in buckets for partition in bucket.partitions]
    assert len(in_buckets) == len(partitions) == len(parameters)
    assert {id(partition) for partition in in_buckets} == {
        id(partition) for partition in partitions
    }
    assert len(buckets) > 3
    for bucket in buckets:
        assert {partition.share for partition in bucket.partitions} == {bucket.share}
        sizes = [8 * partition.parameter.numel() for partition in bucket.partitions]
        assert len(sizes) == 1 or sum(sizes[:-1]) < 100
    experts = [partition.share for partition in partitions[4:6]]
    assert experts == [Share(2, 1, None, 4)] * 2
    assert partitions[0].share == Share(4, 3, None, 4)


@pytest.mark.parametrize(
    ("world", "times"), [(2, 1), (64, 1), (127, 1), (128, 2), (512, 8), (4096, 8)]
)
def test_large_groups_have_larger_buckets(world, times):
    parameters = [nn.Parameter(torch.zeros(25)) for _ in range(64)]
    _, buckets = partitions_of(parameters, Topology(world_size=world), bucket_bytes=400)
    assert {len(bucket.partitions) for bucket in buckets} == {4 * times}


def gradient_of(parameter, number, rank):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
        parameter.dtype
    )


def backward(parameters, rank, skipped=(), turn=0):
    """Run a backward that gives every parameter but the skipped ones the gradient of its number."""
    numbers = [i for i in range(len(parameters)) if i not in skipped]
    # Another order on another rank.
    numbers = numbers[turn:] + numbers[:turn]
    loss = sum((parameters[i] * gradient_of(parameters[i], i, rank)).sum() for i in numbers)
    loss.backward()


def reduced_gradients(stage, parallel, backwards, skip):
    """Return this rank's reduced gradients, flat, of backwards in which ranks skip parameters."""
    rank, place = dist.get_rank(), make_topology([4], parallel)
    parameters = some_parameters()
    mark_root_scaled(parameters[5])
    zero = ZeroState(parameters, place, stage, bucket_bytes=100)
    for update in range(2):  # the second as if there had been no first
        zero.zero_grad()
        for _ in range(backwards):
            backward(parameters, rank, [(skip * rank) % 8] if skip else [], turn=rank)
            zero.finish_backward()
        zero.reduce()
        zero.reduce()  # a criterion with parameters is reduced too: by then all is done
        norm = zero.norm()
        if update == 1:
            assert all(p.grad is None for p, q in zip(parameters, zero.partitions, strict=True)
                       if q.share.size > 1)  # fmt: skip
    found = {}
    for bucket in zero.buckets:
        for partition, grad in zip(bucket.partitions, bucket.gradients(), strict=True):
            found[zero.partitions.index(partition)] = grad
    return [found[i] for i in range(len(found))], float(norm)


@pytest.mark.parametrize(("stage", "parallel", "backwards", "skip"), [
    (1, 2, 1, 0), (2, 2, 1, 0), (2, 2, 3, 3), (1, 2, 3, 3), (2, 4, 2, 5), (2, 1, 2, 1),
])  # fmt: skip
def test_a_reduced_gradient_is_the_average_on_its_owner(ranks, stage, parallel, backwards, skip):
    """Whatever parameters a rank did not use, in whatever order it used the others."""
    got = ranks(4).run(reduced_gradients, stage, parallel, backwards, skip)
    square = 0.0
    for number, parameter in enumerate(some_parameters()):
        for rank in range(4):
            expert = number in (4, 5)
            of = [r for r in range(4) if not expert or r % parallel == rank % parallel]
            total = torch.zeros(parameter.shape, dtype=torch.float64)
            for r in of:
                used = not skip or (skip * r) % 8 != number
                total += backwards * used * gradient_of(parameter, number, r)
            average = total / (2 if number == 5 else 4)  # one is divided by the root
            share = Share(len(of), of.index(rank))
            expected = own_elements(average.contiguous(), share)
            square += float(expected.square().sum())
            torch.testing.assert_close(got[rank][0][number], expected, rtol=1e-12, atol=1e-12)
    norms = [norm for _, norm in got]
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(math.sqrt(square), rel=1e-12)


def poisoned_norm(stage, value):
    place = make_topology([4], 2)
    parameters = some_parameters()
    zero = ZeroState(parameters, place, stage, bucket_bytes=100)
    backward(parameters, dist.get_rank())
    if dist.get_rank() == 1:
        (parameters[4] * value).sum().backward()
    zero.finish_backward()
    zero.reduce()
    return float(zero.clip(1.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_on_one_rank_reaches_all(ranks, value):
    for norm in ranks(4).run(poisoned_norm, 1, value):
        assert not math.isfinite(norm)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-20)


def train_half(dtype, stage, offload, scale):
    """Train half parameters by the gradients of two ranks, given at a scale; return the weights."""
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
            zero.finish_backward()
        zero.reduce()
        zero.multiply(1 / scale)
        zero.clip(2.0 / scale)
        zero.step(optimizer, optimizer.step)
    return [p.data for p in parameters]


def bucket_number(zero, partition):
    return next(i for i, b in enumerate(zero.reducer.shared) if partition in b.partitions)


def fp32_copies_by_hand(dtype, scale):
    """Return the weights by fp32 masters of whole parameters, as fairseq's FP16Optimizer has them."""
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True)])
def test_half_weights_follow_fp32_masters_whatever_the_scale_of_gradients(
    ranks, dtype, stage, offload
):
    # Divided by this in fp16, gradients would vanish; clipping divides once more.
    scale = 2.0**30 if dtype == torch.float16 else 1.0
    expected = fp32_copies_by_hand(dtype, scale)
    for weights in ranks(2).run(train_half, dtype, stage, offload, scale):
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-4)
    alone = train_half(dtype, 1, offload, scale)
    for found, wanted in zip(alone, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-4)


def test_an_optimizer_built_anew_takes_over():
    """fairseq builds a second one when it loads a checkpoint; the first must not take gradients away."""
    place = Topology(world_size=2, rank=0, expert_parallel_size=1)
    parameters = some_parameters()[:1]
    first, second = (ZeroState(parameters, place, 2) for _ in range(2))
    for zero in (first, second):
        zero.reducer._send = lambda zero=zero: setattr(zero.reducer, "sent", 1)
    parameters[0].sum().backward()
    assert (first.reducer.sent, second.reducer.sent) == (0, 1)


def shared_by_two_checkpoints():
    place = make_topology([4], 1)
    parameter = nn.Parameter(torch.ones(4))
    zero = ZeroState([parameter], place, 2)
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda x: x * parameter, x, use_reentrant=True)
    message = ""
    try:
        x.sum().backward()
    except RuntimeError as error:
        message = str(error)
    zero.finish_backward()  # what was sent is to be received
    return message


def test_a_gradient_that_comes_in_parts_is_refused(ranks):
    for message in ranks(2).run(shared_by_two_checkpoints):
        assert "of shape (4,) gets its gradient in several parts" in message
        assert "give --moe-zero-stage 1" in message


class Counting(torch.optim.SGD):
    """Keeps in its group a count of steps and the last rate, as apex's Adam and fairseq's NAG do."""

    def step(self, closure=None):
        group = self.param_groups[0]
        self.seen = [*getattr(self, "seen", []), (group.get("step", 0), group.get("old", None))]
        super().step(closure)
        group["step"], group["old"] = group.get("step", 0) + 1, group["lr"]


def test_what_an_optimizer_counts_counts_updates():
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
    """Return the optimizer's state after two updates, as whole parameters' [local, of experts]."""
    place = make_topology([4], parallel) if dist.is_initialized() else Topology()
    parameters = some_parameters(dtype)
    zero = ZeroState(parameters, place, stage, offload, bucket_bytes=100)
    optimizer = adam(zero.parameters)
    for update in range(2):
        zero.zero_grad()
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient_of(parameter, number + 10 * update, 0)
        zero.reduce()
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
    (1, 1, torch.float64, False), (2, 1, torch.bfloat16, False), (4, 1, torch.float64, True),
    (2, 0, torch.bfloat16, True),
])  # fmt: skip
def test_state_becomes_whole_and_is_cut_again(ranks, parallel, stage, dtype, offload):
    expected = moments(1, 0, dtype, True)
    # The same gradients on all ranks: experts' are summed over replicas and divided by W.
    for whole in ranks(4).run(moments, parallel, stage, dtype, offload):
        for number, (found, wanted) in enumerate(zip(whole, expected, strict=True)):
            assert found.keys() == wanted.keys()
            share = 1.0 if number not in (4, 5) or stage == 0 else 1 / parallel
            for key, factor in (("exp_avg", share), ("exp_avg_sq", share**2), (MASTER, 1.0)):
                if key in wanted:
                    close = {"rtol": 1e-2, "atol": 1e-7} if dtype == torch.bfloat16 else {}
                    torch.testing.assert_close(found[key], factor * wanted[key], **close)
            assert found["step"] == 2


def test_masters_of_a_half_run_become_the_weights_of_a_full_one():
    parameters = some_parameters(torch.float32)
    zero = ZeroState(parameters, Topology(world_size=4, rank=3), 1)
    saved = torch.full((5, 7), 1.0 + 2.0**-20)
    own = zero.own_state(0, {MASTER: saved, "step": 3})
    assert torch.equal(parameters[0].data, saved)  # on every rank all of it
    assert torch.equal(own[MASTER], saved.view(-1)[27:])
    assert own["step"] == 3


def test_moments_in_fp16_are_widened_before_they_are_cut():
    parameters = some_parameters(torch.float32)
    zero = ZeroState(parameters, Topology(world_size=2, rank=1), 1)
    scale = torch.tensor([2.0, 4.0, 8.0, 16.0]).view(4, 1, 1)
    own = zero.own_state(5, {"exp_avg": torch.ones(4, 2, 3).half(), "exp_avg_scale": scale})
    assert own.keys() == {"exp_avg"}
    assert own["exp_avg"].tolist() == [8.0] * 6 + [16.0] * 6


def test_a_state_that_is_a_part_is_refused():
    zero = ZeroState(some_parameters(), Topology(world_size=2), 1)
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 0 has shape \(18,\) but this model needs"
    ):
        zero.own_state(0, {"exp_avg": torch.ones(18)})


def bytes_of(tensors):
    """Return the bytes of tensors, memory that several of them share once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


EVEN = {"dense": [(8, 16), (16,), (4,)], "experts": [(2, 4, 8), (2, 4)]}


def held(parallel, stage, offload, dtype):
    """Return what this rank holds after a backward, and after the gradients are reduced."""
    place = make_topology([4], parallel) if dist.is_initialized() else Topology()
    parameters = [nn.Parameter(torch.ones(s, dtype=dtype)) for s in EVEN["dense"] + EVEN["experts"]]
    for parameter in parameters[3:] if parallel > 1 else ():
        mark_expert(parameter)
    zero = ZeroState(parameters, place, stage, offload, bucket_bytes=200)
    optimizer = adam(zero.parameters)
    for _ in range(2):
        zero.zero_grad()
        backward(parameters, 0)
        zero.finish_backward()
        after_backward = gradient_bytes(zero)
        zero.reduce()
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
    (2, 1, False), (2, 2, False), (4, 2, False), (1, 2, True), (2, 0, True),
])  # fmt: skip
def test_a_rank_holds_the_bytes_of_the_formula(ranks, parallel, stage, offload, dtype):
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
        assert found.device == found.weights + found.gradients + found.state


@pytest.mark.parametrize(("stage", "per_element"), [(0, 20), (1, 2 + 2 + 12 / 4), (2, 2 + 14 / 4)])
def test_the_formula_is_deepspeed_s(stage, per_element):
    """2 + (2 + 12) / D bytes with Adam and 2-byte weights; plain fairseq has fp32 gradients beside."""
    assert held_bytes([1000], [], 4, 1, stage).device == 1000 * per_element
    assert held_bytes([], [1000], 8, 2, stage).device == 1000 * per_element
    offloaded = held_bytes([1000], [], 4, 1, stage, offload=True)
    assert (offloaded.state, offloaded.host) == (0, 12000 if stage == 0 else 3000)
