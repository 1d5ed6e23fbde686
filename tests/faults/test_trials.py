"""Trainings on two ranks that are hit where it hurts: what they say, what they leave, how they go on.

Covered, by one trial each: a kill in the copy behind checkpoint_last, between write and rename, before
ranks meet; a rank that stops in a collective; a disk that fails once, and one that is full; a flipped bit
and a missing file; NaN; an empty batch; another number of ranks.
"""

import os

import pytest
from corpora import language

from .plan import BACKGROUND, Fault, Trial
from .trial import World, run

TIMEOUT = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    os.environ.setdefault("FAIRSEQ_TUTEL_TEST_LOGS", str(folder / "logs"))
    return World(language(tmp_path_factory.mktemp("corpus")), folder, TIMEOUT)


def _trial(kind, fault=None, **others):
    others = {"ranks": 2, "ranks_after": 2, "compared": True, **others}
    return Trial(kind=kind, fault=fault or Fault(), **others)


TRIALS = {
    "ended": [
        _trial("kill in a copy", Fault("kill", "copy", 3, fraction=0.5)),
        _trial("kill before a rename", Fault("kill", "rename", 4)),
        _trial("kill before ranks meet", Fault("kill", "import", rank=1)),
        _trial("stop in a collective", Fault("stop", "collective", 100, rank=1), begun=True),
        _trial("flip", tear="flip", begun=True),
        _trial("full disk", disk=2.5),
        _trial("nan", Fault("nan", "train", 3, rank=1), begun=True),
        _trial("other ranks", Fault("kill", "train", 7, rank=1), ranks_after=1),
        _trial("kill all in a thread", Fault("kill", "shard", 6, rank=1, target="all"), flags=BACKGROUND),
    ],
    "preempted": [
        _trial("signal", Fault("signal", "train", 6, rank=1, detail="SIGUSR1", target="all")),
        _trial("signal to torchrun", Fault("signal", "valid", 2, detail="SIGTERM", target="torchrun")),
    ],
    "went on": [
        _trial("failing disk", Fault("error", "write", 2, fraction=0.5)),
        _trial("empty batch", Fault("empty", "samples", 2, rank=1), begun=True, compared=False),
        _trial("remove", tear="remove", begun=True),
    ],
}


# tests/e2e has a kill in a copy, a stopped rank, a full disk, NaN and another number of ranks.
LONG = (
    "kill in a copy", "stop in a collective", "full disk", "nan", "other ranks", "empty batch", "remove",
    "kill before ranks meet", "failing disk", "kill all in a thread", "signal", "signal to torchrun",
)  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "trial"),
    [
        pytest.param(o, trial, id=trial.kind, marks=[pytest.mark.long] * (trial.kind in LONG))
        for o, trials in TRIALS.items()
        for trial in trials
    ],
)
def test_a_training_that_is_hit_ends_clearly_or_goes_on(outcome, trial, world):
    result = run(trial, world)
    assert not result.problems, result.problems
    assert (result.outcome, result.fired) == (outcome, True)
    assert result.resumed == (outcome != "went on")
    assert result.compared == trial.compared
