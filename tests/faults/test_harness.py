"""The fault trials are reproducible from their seed, of every kind, and able to fail."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from . import files, plan
from .clear import unclear
from .job import Job
from .plan import Fault

COMMUNICATION = "error: rank 0 could not finish a step: "
MISSES_1 = f"{COMMUNICATION}rank 1 did not answer a health check of 3 s; look at the log of rank 1."


def test_a_seed_says_all_and_all_kinds_come_in_turn():
    kinds = plan.kinds()
    assert len(kinds) == len(set(kinds)) > 30
    trials = [plan.draw(seed, 5) for seed in range(4 * len(kinds))]
    random.seed(1)
    assert trials == [plan.draw(seed, 5) for seed in range(4 * len(kinds))]
    assert set(Counter(trial.kind for trial in trials).values()) == {4}
    assert {trial.ranks for trial in trials} == {1, 2, 3, 4}
    drawn = [plan.draw(t.seed, 5, plans=("none",)).flags for t in trials if _chooses_flags(t)]
    assert {*drawn} == {*plan.FLAGS}
    assert sum("{plans}" in trial.flags for trial in trials) > len(trials) / 2
    assert sum(trial.compared for trial in trials) > len(trials) / 2


def _chooses_flags(trial):
    return "background" not in trial.kind and trial.kind != plan.NODES


def test_signals_go_to_a_rank_all_ranks_and_torchrun_in_every_phase():
    trials = [plan.draw(seed, 5, tuple(plan.FORMATS)) for seed in range(40 * len(plan.kinds()))]
    faults = [trial.fault for trial in trials if trial.fault.what == "signal"]
    phases = {f"signal in {phase}" for phase in plan.PLACES} | {"signal at any time"}
    assert {t.kind for t in trials if t.fault.what == "signal"} == phases
    drawn = {(fault.target, fault.detail) for fault in faults}
    assert drawn == {(to, name) for to in ("rank", "all", "torchrun") for name in ("SIGTERM", "SIGUSR1")}
    writing = [trial for trial in trials if trial.kind.endswith("in a background save")]
    assert all("--moe-save-async" in trial.flags for trial in writing)
    assert {t.fault.target for t in writing if t.fault.what == "kill"} == {"rank", "all"}
    assert {trial.fault.rank for trial in trials if trial.kind == plan.NODES} == {0, 1}


def test_every_kind_has_its_fault():
    for trial in (plan.draw(seed, 5) for seed in range(10 * len(plan.kinds()))):
        assert (trial.fault.what == "none") == bool(trial.tear or trial.disk), trial
        assert trial.fault.rank < trial.ranks
        assert trial.ranks > 1 or trial.fault.what not in ("stop", "delay")


def test_formats_of_checkpoints_are_drawn_where_they_are_given():
    trials = [plan.draw(seed, 5, ("full", "sharded"), ("none",)) for seed in range(30)]
    drawn = {trial.flags[-2:] for trial in trials if _chooses_flags(trial)}
    assert drawn == {("--moe-checkpoint", "full"), ("--moe-checkpoint", "sharded")}


def _job(codes, logs, hung=()):
    return Job(list(codes), list(logs), fired=True, hung=list(hung), seconds=1.0)


KILLED = Fault("kill", "train", rank=1)


@pytest.mark.parametrize(
    ("codes", "logs", "hung", "problem"),
    [
        ((1, -9), (MISSES_1, ""), (), None),
        ((0, 0), ("", ""), (), None),
        ((-9, -9), ("", ""), (0,), "rank 0 hung"),
        ((-6, -9), (MISSES_1, ""), (), "rank 0 was ended by signal 6"),
        ((1, -9), ("RuntimeError: Connection closed by peer", ""), (), "rank 0 ended with: 'RuntimeE"),
        ((1, -9), ("Killed", ""), (), "rank 0 ended with: 'Killed'"),
        ((1, -9), (MISSES_1.replace("rank 1", "rank 2"), ""), (), "no rank names rank 1"),
    ],
)  # fmt: skip
def test_what_is_unclear_is_seen(codes, logs, hung, problem):
    problems = unclear(_job(codes, logs, hung), KILLED)
    assert (problems == []) if problem is None else any(p.startswith(problem) for p in problems)


SIGNALLED = Fault("signal", "train", rank=1, detail="SIGTERM")
SAVED = '"num_updates": "3"\na rank received a signal; update 3 is saved in save/checkpoint_last.pt, and …'
NOTHING = "a rank received a signal; there is nothing to save before the first update"


@pytest.mark.parametrize(
    ("codes", "logs", "target", "problem"),
    [
        ((75, 75), (SAVED, ""), "rank", None),
        ((75, 75), (NOTHING, ""), "all", None),
        ((0, 0), ("", ""), "all", None),
        ((1, -15), (MISSES_1, ""), "rank", None),
        ((-15, -15), ("", ""), "all", None),
        ((1,), (SAVED,), "torchrun", None),
        ((-15,), ("",), "torchrun", None),
        ((1,), (SAVED + "will restart worker group",), "torchrun", "torchrun started the ranks again"),
        ((1,), ('"num_updates": "3"',), "torchrun", "trained, and did not save"),
        ((-15, 1), ('"num_updates": "3"', MISSES_1), "rank", "trained, and did not save"),
        ((75, 143), (SAVED, ""), "rank", "saved, and has exit codes"),
        ((75, 1), (NOTHING, "Killed"), "rank", "saved, and has exit codes"),
        ((-15, 1), ("", "Killed"), "rank", "rank 1 ended with 1: 'Killed'"),
    ],
)
def test_a_signal_must_be_followed_by_a_save(codes, logs, target, problem):
    problems = unclear(_job(codes, logs), replace(SIGNALLED, target=target))
    assert (problems == []) if problem is None else problems[0].startswith(problem), problems


def test_the_rank_that_failed_must_say_its_error():
    fault = Fault("error", "train", rank=1)
    logs = [MISSES_1, "KeyError: 'an injected fault: a broken sample'"]
    assert unclear(_job((1, 1), logs), fault) == []
    logs = [MISSES_1, COMMUNICATION + "ranks 0-1 answered a health check"]
    assert "does not say its error" in unclear(_job((1, 1), logs), fault)[0]
    logs = [MISSES_1, "error: rank 1 ran out of memory in a training step; lower --max-tokens"]
    assert unclear(_job((1, 1), logs), replace(fault, detail="memory")) == []


@pytest.fixture
def save_dir(tmp_path):
    model = {"decoder.layers.0.fc1.experts.fc1_weight": torch.ones(4, 3, 2)}
    states = {0: {"exp_avg": torch.zeros(4, 3, 2)}}
    for updates in (2, 4):
        content = {
            "model": model,
            "last_optimizer_state": {"state": states},
            "optimizer_history": [{"num_updates": updates}],
        }
        torch.save(content, tmp_path / f"checkpoint_1_{updates}.pt")
    (tmp_path / "experts" / "0123456789abcdef").mkdir(parents=True)
    (tmp_path / "experts" / "0123456789abcdef" / "0.safetensors").write_text("{}")
    return tmp_path


def test_whole_checkpoints_are_told_from_torn_and_poor_ones(save_dir):
    first, second = files.checkpoints(save_dir)
    assert files.problem_of(second, 4) is None
    assert files.newest([first, second]) == second
    assert "does not hold 8 experts" in files.problem_of(second, 8)
    content = torch.load(first)
    content["model"]["decoder.layers.0.fc1.experts.fc1_weight"][1, 2] = torch.nan
    torch.save(content, first)
    assert "has NaN or infinite numbers in decoder" in files.problem_of(first, 4)
    first.write_bytes(second.read_bytes()[:500])
    assert "does not open" in files.problem_of(first, 4)


@pytest.mark.parametrize("how", plan.TEARS)
def test_any_file_can_be_torn_those_in_folders_too(how, save_dir):
    before = {path: path.read_bytes() for path in save_dir.rglob("*.*") if path.is_file()}
    torn = set()
    for seed in range(30):
        path = files.tear(how, save_dir, seed)
        assert not path.exists() or path.read_bytes() != before[path] or how == "truncate"
        path.write_bytes(before[path])
        torn.add(path.name)
    assert torn == {path.name for path in before}
