"""After a signal, a run saves a checkpoint and ends; the resumed run equals a run without a signal."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from cli import USER_DIR, fairseq, start, tail, wait
from equality import facts_of, same_bits
from faults.trial import PLACES, Trial, environment
from launchers import launch, torchrun
from models import dense_lm_args, lm_args
from test_sharded_checkpoints import SHARDED, load

from fairseq_tutel.parallel.signals import EXIT_CODE

SPAWNING = str(Path(__file__).parent / "spawning_user_dir")
LONG = pytest.mark.long
UPDATES = 7
SAVES = ("--save-interval-updates", 3, "--dropout", 0.1)


def _words(make, data, folder, *flags, updates=UPDATES):
    return make(data, folder / "save", *SAVES, "--user-dir", PLACES, *flags, updates=updates)


@pytest.fixture(scope="module")
def unbroken(lm_data, tmp_path_factory):
    """Return a function that trains without a signal and returns the folder of the run."""
    folders = {}

    def of(make, ranks, *flags):
        key = (make, ranks, flags)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("unbroken")
            words = _words(make, lm_data, folders[key], *flags)
            fairseq("train", *words, ranks=ranks, env=environment(folders[key], Trial()))
        return folders[key]

    return of


def same_end(expected, folder, updates=UPDATES):
    expected, found = load(expected / "save"), load(folder / "save")
    assert found["optimizer_history"][-1]["num_updates"] == updates
    same_bits(expected["model"], found["model"])
    same_bits(expected["last_optimizer_state"]["state"], found["last_optimizer_state"]["state"])
    assert facts_of(found) == facts_of(expected)


def updates_of(folder):
    path = folder / "save" / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False) if path.exists() else None
    return None if state is None else state["optimizer_history"][-1]["num_updates"]


CASES = {
    "update": (lm_args, 2, ("train", 5, 1), (), 5),
    "dense": (dense_lm_args, 1, ("train", 2, 0, "SIGTERM"), (), 2),
    "validation": (lm_args, 2, ("valid", 2, 1), (), 3),
    "save of shards": (lm_args, 2, ("shard", 2, 1), SHARDED, 3),
    "zero": (lm_args, 4, ("train", 5, 3), ("--moe-zero-stage", 2), 5),
    "end of an epoch": (lm_args, 2, ("train", 5, 0), ("--batch-size", 24), 5),
}
QUICK = {"update", "dense"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[LONG] * (c not in QUICK)) for c in CASES])
def test_a_run_resumed_after_a_signal_equals_a_run_without_a_signal(lm_data, tmp_path, unbroken, case):
    make, ranks, at, flags, saved = CASES[case]
    words = _words(make, lm_data, tmp_path, *flags)
    place, when, rank, *number = at
    trial = Trial(what="signal", place=place, when=when, rank=rank, number=(*number, "SIGUSR1")[0])
    env = environment(tmp_path, trial)
    run = wait(start("train", *words, ranks=ranks, env=env))
    assert run.exit_codes == [EXIT_CODE] * ranks, tail(run.output)
    assert run.output.count(f"received {trial.number}: all ranks will save") == 1
    assert updates_of(tmp_path) == saved
    assert f"update {saved} is saved in" in run.logs[0]
    again = fairseq("train", *words, ranks=ranks, env=env)
    assert f"@ {saved} updates)" in again.output
    same_end(unbroken(make, ranks, *flags), tmp_path)


def test_a_signal_before_the_first_update_saves_nothing(lm_data, tmp_path):
    env = environment(tmp_path, Trial(what="signal", place="built", number="SIGUSR1"))
    run = wait(start("train", *_words(lm_args, lm_data, tmp_path), env=env))
    assert run.exit_codes == [EXIT_CODE]
    assert "received SIGUSR1: there is nothing to save before the first update" in run.output
    assert updates_of(tmp_path) is None


@LONG
def test_only_the_signals_of_moe_preemption_signals_are_handled(lm_data, tmp_path):
    words = _words(lm_args, lm_data, tmp_path, "--moe-preemption-signals", "SIGUSR2")
    trial = Trial(what="signal", place="train", when=2, number="SIGUSR1")
    run = wait(start("train", *words, env=environment(tmp_path, trial)))
    assert run.exit_codes == [-signal.SIGUSR1]


@LONG
def test_the_main_process_forwards_a_signal_to_spawned_ranks(lm_data, tmp_path):
    words = lm_args(
        lm_data, tmp_path / "save", "--user-dir", SPAWNING, "--distributed-world-size", 2,
        "--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo", "--cpu", updates=100_000,
    )  # fmt: skip
    process = launch(("fairseq_cli.train",), words, log := tmp_path / "log")
    _wait_for_line(log, '"num_updates": "3"', lambda: process.poll() is None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == EXIT_CODE, tail(log.read_text())
    assert "received SIGTERM, and sent it to the ranks" in log.read_text()
    assert "nothing to save" not in log.read_text()
    assert updates_of(tmp_path) >= 3


def _wait_for_line(log, line, is_alive, seconds=90):
    deadline = time.monotonic() + seconds
    while not log.exists() or line not in log.read_text():
        assert time.monotonic() < deadline and is_alive(), tail(log.read_text())
        time.sleep(0.02)


@LONG
def test_torchrun_forwards_a_signal_and_does_not_restart_the_ranks(lm_data, tmp_path):
    flags = ("--max-restarts", 3, "--signals-to-handle", "SIGTERM,SIGUSR1")
    words = lm_args(lm_data, tmp_path / "save", "--user-dir", USER_DIR, *SAVES, updates=100_000)
    agent = launch(torchrun(2, *flags), words, log := tmp_path / "log")
    _wait_for_line(log, '"num_updates": "4"', lambda: agent.poll() is None)
    agent.send_signal(signal.SIGUSR1)
    assert agent.wait(60) == 1
    text = log.read_text()
    assert "is saved in" in text and "Restart" not in text, tail(text)


@LONG
def test_data_loader_workers_ignore_a_signal_to_the_process_group(lm_data, tmp_path):
    flags = ("--num-workers", 2, "--max-update", 2000)
    words = _words(lm_args, lm_data, tmp_path, "--user-dir", USER_DIR, *flags)
    process = launch(("fairseq_tutel.train",), words, log := tmp_path / "log")
    _wait_for_line(log, '"num_updates": "4"', lambda: process.poll() is None)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == EXIT_CODE, tail(log.read_text())
    assert updates_of(tmp_path) >= 4
