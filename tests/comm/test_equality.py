"""The same micro-batches give the same training on 1, 2 and 4 ranks, to 1e-10 in fp64.

Covered, in pairwise combinations: SGD and AdamW; dropless, capacity, negative capacity; top-1, 2, 4;
drop policies that draw no random numbers; linear and cosine gate; several balance losses; ragged and
padded exchange; experts over all ranks, over some (replicas), over none; activation checkpointing of
both kinds. Losses, gradient norms and weights are compared.
"""

import functools
import itertools

import pytest
import torch
from training import CLIP_NORM, Training, train

CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "top_k": (1, 2, 4),
    "capacity_factor": (0.0, 1.0, -0.5),
    "drop_policy": ("position", "bpr", "probability"),
    "gate": ("linear", "cosine"),
    "exchange": ("ragged", "padded"),
    "recompute": ("no", "reentrant", "non-reentrant"),
    "parallel": (0, 2, 1),  # 0: over all ranks
}


def pairs(case: tuple) -> set[tuple]:
    return set(itertools.combinations(enumerate(case), 2))


def pairwise(choices: dict[str, tuple]) -> list[Training]:
    """Return few cases in which every pair of values of two options occurs: greedy, no randomness."""
    product = list(itertools.product(*choices.values()))
    missing = set().union(*map(pairs, product))
    cases = []
    while missing:
        best = max(product, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append(Training(**dict(zip(choices, best, strict=True))))
    return cases


CASES = pairwise(CHOICES)


def name_of(case: Training) -> str:
    return "-".join(str(value) for value in vars(case).values())


@functools.cache
def on_one_rank(*computed) -> dict[str, torch.Tensor]:
    return train(Training(*computed))


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_training_does_not_depend_on_the_number_of_ranks(ranks, case, world_size):
    expected = on_one_rank(
        case.optimizer, case.top_k, case.capacity_factor, case.drop_policy, case.gate
    )
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
            *(n for n in got if n.startswith(("dense.", "first.gate."))),
        ):
            assert torch.equal(other[name], got[name]), name


def test_the_training_trains_clips_and_drops():
    result = on_one_rank("adamw", 2, 0.0)
    assert result["losses"][-5:].mean() < 0.9 * result["losses"][:5].mean()
    assert (result["norms"] > CLIP_NORM).any() and (result["norms"] < CLIP_NORM).any()
    dropping = on_one_rank("adamw", 2, 1.0)
    assert not torch.allclose(dropping["losses"], result["losses"])


def test_the_cases_hold_every_pair_of_values():
    held = set().union(*(pairs(tuple(vars(case).values())) for case in CASES))
    order = list(vars(CASES[0]))
    wanted = [CHOICES[name] for name in order]
    assert set().union(*map(pairs, itertools.product(*wanted))) == held
