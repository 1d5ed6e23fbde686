"""The same micro-batches give the same training on 1, 2 and 4 ranks, to 1e-10 in fp64.

Options are combined in pairs; those in which one value leaves the other no effect are left out. Losses,
gradient norms, weights and biases are compared.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from option_values import draws
from training import CHOOSING, CLIP_NORM, LAYOUTS, UPDATES, WAYS, Training, train

from fairseq_tutel import MoEConfig
from fairseq_tutel.moe.config import GATE_TYPES, LAYER
from fairseq_tutel.plans.executors.one_sided import OneSided

CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "top_k": (1, 2, 4),
    "capacity_factor": (0.0, 0.5, -0.75),
    "drop_policy": tuple(p for p in LAYER["drop_policy"].choices if not draws({"drop_policy": p})),
    "gate": tuple(gate for gate in GATE_TYPES if gate != "hash"),  # which needs token IDs
    "choice": tuple(CHOOSING),
    "scores": LAYER["score_function"].choices,
    "normalize": LAYER["normalize_gate"].choices,
    "prescore": (False, True),
    "bias": (False, True),
    "beside": ("none", "shared", "residual", "cmr"),
    "exchange": LAYER["exchange"].choices,
    "layout": tuple(LAYOUTS),
    "way": tuple(WAYS),
    "recompute": ("no", "reentrant", "non-reentrant"),
    "pregate": (0, 1),
}
NO_ROWS = ("four, gathered", "four on every rank", "slices, r 0")
NO_NODES = (*NO_ROWS, "four, two replicas", "two, two replicas")
# Values with which others have no effect. Pairs that a layer refuses are left out, too. Every option has a
# value that goes with all.
POINTLESS = (
    ("layout", NO_ROWS, "way", ("chunks",)),
    ("layout", NO_NODES, "way", ("nodes", "nodes, chunks")),
    ("layout", NO_ROWS, "exchange", ("padded",)),
    ("capacity_factor", (0.0,), "drop_policy", CHOICES["drop_policy"][1:]),
    ("recompute", ("reentrant", "non-reentrant"), "pregate", (1,)),  # which is refused
)
SEEDS = 20  # tried for each case; of several numbers the one that needs the fewest cases


def pairs(case: tuple) -> set[tuple]:
    return set(itertools.combinations(enumerate(case), 2))


def numbered(name: str, values: tuple) -> list[tuple[int, int]]:
    """Return options and values by their numbers."""
    return [(list(CHOICES).index(name), CHOICES[name].index(value)) for value in values]


def is_refused(values: dict) -> bool:
    """Return whether a layer refuses these values together."""
    case = Training(**{"optimizer": "sgd", "top_k": 2, "capacity_factor": 0.0, **values})
    try:
        MoEConfig(model_dim=1, hidden_dim=1, **case.options())
    except ValueError:
        return True
    return False


NOT_TOGETHER = {
    tuple(sorted(pair))
    for one, values, other, others in POINTLESS
    for pair in itertools.product(numbered(one, values), numbered(other, others))
} | {
    tuple(sorted([*numbered(one, (value,)), *numbered(other, (second,))]))
    for (one, values), (other, others) in itertools.combinations(CHOICES.items(), 2)
    for value, second in itertools.product(values, others)
    if is_refused({one: value, other: second})
}


def all_pairs() -> set[tuple]:
    """Return every pair of (option, value) that says something, by their numbers."""
    sides = itertools.combinations(enumerate(map(len, CHOICES.values())), 2)
    every = {((i, a), (j, b)) for (i, m), (j, n) in sides for a in range(m) for b in range(n)}
    return every - NOT_TOGETHER


def grown(seed: tuple, missing: set[tuple]) -> tuple:
    """Return a case that holds a pair, each other option by how many missing pairs its value adds."""
    case = dict(seed)
    for i, values in enumerate(CHOICES.values()):
        if i not in case:
            added = {}
            for a in range(len(values)):
                new = {tuple(sorted([(i, a), other])) for other in case.items()}
                if not new & NOT_TOGETHER:
                    added[a] = len(new & missing)
            case[i] = max(added, key=lambda a, added=added: added[a])
    return tuple(case[i] for i in range(len(CHOICES)))


def pairwise() -> list[Training]:
    """Return few cases in which every such pair occurs: greedy, no randomness."""
    missing = all_pairs()
    cases = []
    while missing:
        seeds = sorted(missing)[:SEEDS]
        grew = [grown(seed, missing) for seed in seeds]
        best = max(grew, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen = zip(CHOICES.items(), best, strict=True)
        cases.append(Training(**{name: values[a] for (name, values), a in chosen}))
    return cases


CASES = pairwise()


def name_of(case: Training | int) -> str:
    return str(case) if isinstance(case, int) else "-".join(map(str, vars(case).values()))


@functools.cache
def on_one_rank(training: Training, updates: int = UPDATES) -> dict[str, torch.Tensor]:
    return train(training, updates)


def same_on_one_rank(case: Training, updates: int) -> dict[str, torch.Tensor]:
    """Train what the case computes, in the plainest way."""
    return on_one_rank(
        dataclasses.replace(
            case,
            exchange="ragged",
            layout="four" if LAYOUTS[case.layout].experts == 4 else "two, two replicas",
            way="plain",
            recompute="no",
        ),
        updates,
    )


# On two ranks each has two of the four micro-batches, which is new wherever the experts are.
RUNS = [(case, 4) for case in CASES] + [(case, 2) for case in CASES if case.layout == "four"]
# Every other case of two ranks, two thirds of those of four, and what follows these updates, are left to
# `make test-long`: pairs hold over all cases, by then some micro-batches were empty or all padding, and
# optimizers have a state.
FEW = 5
QUICK = [run for run in RUNS if run[1] == 2][::2] + [(case, 4) for case in CASES[::3]]


@pytest.mark.parametrize(
    "updates, case, world_size",
    [(FEW, *run) for run in QUICK] + [pytest.param(UPDATES, *run, marks=pytest.mark.long) for run in RUNS],
    ids=name_of,
)
def test_training_does_not_depend_on_the_number_of_ranks(ranks, updates, case, world_size):
    expected = same_on_one_rank(case, updates)
    got, *others = ranks(world_size).run(train, case, updates)
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


PLANNED_UPDATES = 5  # with empty micro-batches and padding among them


def train_by_plans(case: Training) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Train, and say what ran by plans."""
    ran, original = set(), OneSided.start

    def start(self, *arguments):
        ran.add(self.plan.collective)
        return original(self, *arguments)

    OneSided.start = start
    try:
        return train(case, PLANNED_UPDATES), ran
    finally:
        OneSided.start = original


@pytest.mark.parametrize(
    "layout, way, world_size, what",
    [
        ("four, two replicas", "plans, chunks", 4, {"all_reduce", "all_to_all"}),
        ("slices, r 1", "plans", 4, {"all_reduce", "all_to_all", "all_gather", "reduce_scatter"}),
        pytest.param(
            "four, gathered",
            "plans",
            4,
            {"all_reduce", "all_gather", "reduce_scatter"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "slices, r 2", "plans, chunks", 4, {"all_reduce", "all_to_all"}, marks=pytest.mark.long
        ),
        pytest.param("four", "plans", 2, {"all_reduce", "all_to_all"}, marks=pytest.mark.long),
        pytest.param("four on every rank", "plans", 2, {"all_reduce"}, marks=pytest.mark.long),
    ],
)
def test_plans_train_the_same(ranks, layout, way, world_size, what):
    padded = "padded" if way == "plans" else "ragged"
    case = Training("adamw", 2, 0.5, layout=layout, way=way, exchange=padded)
    expected = same_on_one_rank(case, PLANNED_UPDATES)
    results = ranks(world_size).run(train_by_plans, case)
    assert [ran for _, ran in results] == [what] * world_size
    for name, tensor in expected.items():
        torch.testing.assert_close(results[0][0][name], tensor, rtol=1e-10, atol=1e-10)
    for other, _ in results:
        assert torch.equal(other["norms"], results[0][0]["norms"])


def test_the_training_trains_clips_and_drops():
    result = on_one_rank(Training("adamw", 2, 0.0))
    assert result["losses"][-5:].mean() < 0.9 * result["losses"][:5].mean()
    assert (result["norms"] > CLIP_NORM).any() and (result["norms"] < CLIP_NORM).any()
    first = on_one_rank(Training("adamw", 2, 0.0), FEW)
    for change in (
        {"capacity_factor": 0.5},
        {"capacity_factor": -0.75},
        {"bias": True},
        {"choice": "groups"},
        {"prescore": True},
        {"pregate": 1},
    ):
        other = on_one_rank(
            Training(**{"optimizer": "adamw", "top_k": 2, "capacity_factor": 0.0, **change}), FEW
        )
        assert not torch.allclose(other["losses"], first["losses"]), change
    biases = on_one_rank(Training("adamw", 2, 0.0, bias=True))["last.balance_bias.bias"]
    assert 0.05 < float(biases.abs().max()) <= 20 * 0.05 + 1e-6
