"""The same micro-batches give the same training on 1, 2 and 4 ranks, to 1e-10 in fp64.

Covered, in pairwise combinations: SGD and AdamW; dropless, capacity, negative capacity; top-1, 2, 4;
drop policies that draw no random numbers; linear and cosine gate; tokens, experts and groups of experts
that choose; softmax and sigmoid; every normalisation; weights on inputs; the balance bias; shared and
residual experts; several balance losses; ragged and padded exchange, linear and hierarchical, in chunks;
experts over all ranks, over some (replicas), over none, in slices; every r; activation checkpointing of
both kinds. Losses, gradient norms, weights and biases
are compared.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from training import CLIP_NORM, Training, train

CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "top_k": (1, 2, 4),
    "capacity_factor": (0.0, 1.0, -0.5),
    "experts": (4, 2),
    "drop_policy": ("position", "bpr", "probability"),
    "gate": ("linear", "cosine"),
    "choice": ("tokens", "experts", "groups"),
    "scores": ("softmax", "sigmoid"),
    "normalize": ("before", "after", "none"),
    "prescore": (False, True),
    "bias": (False, True),
    "beside": ("none", "shared", "residual"),
    "exchange": ("ragged", "padded"),
    "ranks_per_node": (0, 2),  # 2: of four ranks, two nodes
    "parallel": ("gcd", "2", "1", "all"),  # all: of four ranks two for each of two experts
    "degree": (1, 0, 2),
    "overlap": (1, 3),
    "recompute": ("no", "reentrant", "non-reentrant"),
}
SEEDS = 30  # tried for each case; of several numbers the one that needs the fewest cases


def pairs(case: tuple) -> set[tuple]:
    return set(itertools.combinations(enumerate(case), 2))


def all_pairs(choices: dict[str, tuple]) -> set[tuple]:
    """Return every pair of (option, value), by their numbers."""
    sides = itertools.combinations(enumerate(map(len, choices.values())), 2)
    return {((i, a), (j, b)) for (i, m), (j, n) in sides for a in range(m) for b in range(n)}


def grown(seed: tuple, choices: dict[str, tuple], missing: set[tuple]) -> tuple:
    """Return a case that holds a pair, each other option by how many missing pairs its value adds."""
    case = dict(seed)
    for i, values in enumerate(choices.values()):
        if i not in case:
            case[i] = max(
                range(len(values)),
                key=lambda a, i=i: sum(
                    tuple(sorted([(i, a), other])) in missing for other in case.items()
                ),
            )
    return tuple(case[i] for i in range(len(choices)))


def pairwise(choices: dict[str, tuple]) -> list[Training]:
    """Return few cases in which every pair of values of two options occurs: greedy, no randomness."""
    missing = all_pairs(choices)
    cases = []
    while missing:
        seeds = sorted(missing)[:SEEDS]
        grew = [grown(seed, choices, missing) for seed in seeds]
        best = max(grew, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen = zip(choices.items(), best, strict=True)
        cases.append(Training(**{name: values[a] for (name, values), a in chosen}))
    return cases


CASES = pairwise(CHOICES)


def name_of(case: Training) -> str:
    return "-".join(str(value) for value in vars(case).values())


@functools.cache
def on_one_rank(training: Training) -> dict[str, torch.Tensor]:
    return train(training)


def same_on_one_rank(case: Training) -> dict[str, torch.Tensor]:
    """Train what the case computes, in the plainest way."""
    return on_one_rank(
        dataclasses.replace(
            case,
            exchange="ragged",
            ranks_per_node=0,
            parallel="gcd",
            degree=1,
            overlap=1,
            recompute="no",
        )
    )


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_training_does_not_depend_on_the_number_of_ranks(ranks, case, world_size):
    expected = same_on_one_rank(case)
    got, *others = ranks(world_size).run(train, case)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )
    for other in others:  # every rank takes the same decisions
        for name in (
            "losses",
            "norms",
            *(n for n in got if n.startswith(("dense.", "first.gate.", "first.b"))),
        ):
            assert torch.equal(other[name], got[name]), name


def test_the_training_trains_clips_and_drops():
    result = on_one_rank(Training("adamw", 2, 0.0))
    assert result["losses"][-5:].mean() < 0.9 * result["losses"][:5].mean()
    assert (result["norms"] > CLIP_NORM).any() and (result["norms"] < CLIP_NORM).any()
    for change in (
        {"capacity_factor": 1.0},
        {"bias": True},
        {"choice": "groups"},
        {"prescore": True},
    ):
        other = on_one_rank(
            Training(**{"optimizer": "adamw", "top_k": 2, "capacity_factor": 0.0, **change})
        )
        assert not torch.allclose(other["losses"], result["losses"]), change
    biases = on_one_rank(Training("adamw", 2, 0.0, bias=True))["last.balance_bias.bias"]
    assert 0.05 < float(biases.abs().max()) <= 20 * 0.05 + 1e-6


def test_the_cases_hold_every_pair_of_values():
    held = set()
    for case in CASES:
        held |= pairs(tuple(CHOICES[name].index(value) for name, value in vars(case).items()))
    assert list(vars(CASES[0])) == list(CHOICES)
    assert held == all_pairs(CHOICES)
