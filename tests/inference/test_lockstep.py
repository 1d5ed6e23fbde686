"""Ranks may call expert-parallel layers at different times; outputs equal those of a single process."""

import dataclasses
import random

import mortal
import pytest
import torch
import torch.distributed as dist

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.inference.lockstep import IS_DONE, RESTS, Lockstep, next_layer
from fairseq_tutel.parallel import guard
from fairseq_tutel.plugin.feed_forward import Context, MoEFeedForward

SMALL = MoEConfig(model_dim=4, hidden_dim=8, num_experts=4)
LARGE = MoEConfig(model_dim=8, hidden_dim=4, num_experts=8, top_k=3, expert_type="glu")
FEW = dataclasses.replace(SMALL, num_experts=2)


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ([3, 3, 1, IS_DONE], 3),
        ([2, 1, RESTS], 1),
        ([5, 5, 0, 0], 0),
        ([RESTS, 7], 7),
        ([RESTS, IS_DONE], None),
    ],
)
def test_the_layer_that_most_ranks_request_runs_first_and_ties_go_to_the_lowest_index(wishes, expected):
    assert next_layer(wishes) == expected


def _layers(configs, parallel, local):
    """Return a `Lockstep` and pairs of layers: an expert-parallel layer and an equal layer on one rank."""
    topology = make_topology([c.num_experts for c in configs], parallel, local)
    lockstep = Lockstep(topology.expert_group)
    pairs = []
    for i, config in enumerate(configs):
        split, whole = (
            MoELayer(config, where, seed=3, name=str(i)).double().eval() for where in (topology, None)
        )
        assert lockstep.add(split.run_without_tokens) == i
        pairs.append((split, whole))
    return lockstep, pairs


def _calls(rank, number):
    """Return the random calls of a rank as (layer index, number of tokens); rank 1 makes no calls."""
    rng = random.Random(rank)
    count = 0 if rank == 1 else rng.randint(4, 9)
    return [(rng.randrange(number), rng.choice([0, 1, 5])) for _ in range(count)]


@torch.no_grad()
def _call(lockstep, pairs, index, tokens, salt):
    split, whole = pairs[index]
    generator = torch.Generator().manual_seed(salt)
    x = torch.randn(tokens, split.config.model_dim, generator=generator, dtype=torch.float64)
    lockstep.wait_for_turn(index)
    y, _ = split(x)
    torch.testing.assert_close(y, whole(x)[0], rtol=1e-12, atol=1e-12)


def at_their_own_pace(configs, parallel, local):
    lockstep, pairs = _layers(configs, parallel, local)
    calls = _calls(dist.get_rank(), len(configs))
    for salt, (index, tokens) in enumerate(calls):
        _call(lockstep, pairs, index, tokens, salt)
    lockstep.end()
    return len(calls), lockstep.calls, lockstep.served


def _with(config, **options):
    return dataclasses.replace(config, **options)


CASES = {
    "two sizes": ([SMALL, LARGE], 0, 0),
    "padded": ([_with(SMALL, exchange="padded"), LARGE], 0, 0),
    "chunks": ([SMALL, _with(LARGE, a2a_ffn_overlap_degree=3)], 0, 0),
    "all experts gathered": ([_with(SMALL, adaptive_r=0), LARGE], 0, 0),
}
ON_FOUR = {
    "two groups": ([SMALL, LARGE], 2, 0),
    "two hops": ([_with(SMALL, a2a_algorithm="2dh"), LARGE], 4, 2),
    "slices": ([FEW, LARGE], 4, 0),
    "slices to all": ([_with(FEW, adaptive_r=2), LARGE], 4, 0),
}


@pytest.mark.parametrize(
    ("world_size", "case"),
    [*((2, case) for case in CASES.values()), *((4, case) for case in ON_FOUR.values())],
    ids=[*CASES, *ON_FOUR],
)
def test_ranks_that_call_different_layers_get_the_same_outputs_as_on_one_rank(ranks, world_size, case):
    found = ranks(world_size).run(at_their_own_pace, *case)
    assert all(wanted == own for wanted, own, _ in found)
    _, own, served = found[1]
    assert own == 0 and served > 0  # Rank 1 only joins calls of other ranks.
    size = case[1] or world_size
    for first in range(0, world_size, size):
        rounds = {own + served for _, own, served in found[first : first + size]}
        assert len(rounds) == 1  # All ranks of a group join every call, and no call runs twice.
        group = [own for _, own, _ in found[first : first + size]]
        assert max(group) <= rounds.pop() <= sum(group)


def steps_that_end_together():
    """Run steps in which rank r makes r calls; a collective of all ranks follows each step."""
    lockstep, pairs = _layers([SMALL, LARGE], 0, 0)
    for step in range(3):
        for salt in range(dist.get_rank()):
            _call(lockstep, pairs, (step + salt) % 2, 3, salt)
        lockstep.rest()
        dist.barrier()
    if dist.get_rank() == 0:  # Rank 0 leaves the lockstep while other ranks still run steps.
        lockstep.end()
        return lockstep.served
    for salt in range(2):
        _call(lockstep, pairs, 0, dist.get_rank(), salt)
        lockstep.rest()
    lockstep.end()
    return lockstep.served


@pytest.mark.parametrize("world_size", (2, 4))
def test_a_lockstep_step_ends_when_no_rank_requests_a_layer(ranks, world_size):
    served = ranks(world_size).run(steps_that_end_together)
    assert served[0] >= 3 * (world_size - 1) + 2


def joining_changes_no_state():
    config = _with(SMALL, eval_capacity_factor=1.0)
    topology, turns = make_topology([config.num_experts]), []
    context = Context(wait_for_turn=turns.append)
    layer = MoEFeedForward(config, topology, 1, "decoder.layers.0.fc1", context).eval()
    layer.time_exchanges()
    x = torch.randn(3, 2, config.model_dim)
    layer.begin_call(torch.zeros(2, 3, dtype=torch.bool))
    with torch.no_grad():
        layer(x)
    layer.timer.read_and_reset()
    before = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.run_without_tokens()
    for key, value in before.items():
        assert getattr(layer, key) is value, key
    assert all(torch.equal(state[name], tensor) for name, tensor in layer.state_dict().items())
    assert layer.timer.read_and_reset()["all_to_all_cpu_time_ms"] == 0
    layer.train()(x)
    assert turns == [layer]  # Training does not wait for turns, because all ranks make equal calls.


def test_a_layer_that_joins_a_call_without_tokens_keeps_its_state(ranks):
    ranks(2).run(joining_changes_no_state)


def _half_way(rank, fate):
    guard.set_timeout(1)
    lockstep, pairs = _layers([SMALL, LARGE], 0, 0)
    for step in range(4):
        if rank == 1 and step == 2:
            fate()
        _call(lockstep, pairs, step % 2, 1 + rank, step)
    lockstep.end()


def fail():
    raise ValueError("no such word")


@pytest.mark.parametrize("fate", [pytest.param(fail, marks=pytest.mark.long), mortal.die])
def test_a_rank_that_fails_in_lockstep_ends_the_other_ranks(fate):
    message, seconds = mortal.run(_half_way, 2, [0] if fate is mortal.die else [0, 1], fate)
    assert "CommunicationError: rank 0 could not finish the agreement on the next layer" in message[0]
    assert "rank 1 did not answer a health check" in message[0]
    assert message[1:] in ([], ["ValueError: no such word"])
    assert seconds < 12
