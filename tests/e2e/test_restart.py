"""A launcher that starts ranks again: the training goes on from its newest checkpoint, to the same end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cli import ROOT, fairseq, refused, start, tail, torchrun_environment, wait
from equality import facts_of, same_bits
from models import lm_args
from ports import free_port

PLACES = str(Path(__file__).parents[1] / "faults" / "faulty_places")
FAULTY = str(Path(__file__).parent / "faulty_user_dir")
SAVES = ("--save-interval-updates", 2, "--dropout", 0.1, "--user-dir", PLACES)
UPDATES = 6


def _environment(folder, what="kill", when=5):
    """Return what makes rank 1 kill itself in training step `when`, once."""
    fault = {
        "what": what, "place": "train", "when": when, "rank": 1, "marker": str(folder / "fired"),
        "save_dir": str(folder / "save"), "seconds": 0, "detail": "", "fraction": 0,
    }  # fmt: skip
    return {"FAULT": json.dumps(fault)}


def _files(folder):
    status = {file.name: file.stat() for file in folder.iterdir()}
    return {name: (own.st_ino, own.st_mtime_ns) for name, own in status.items()}


def _load(folder):
    return torch.load(folder / "save" / "checkpoint_last.pt", weights_only=False)


@pytest.fixture(scope="module")
def undisturbed(lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    words = lm_args(lm_data, folder / "save", *SAVES, updates=UPDATES)
    fairseq("train", *words, ranks=2, env=_environment(folder, what="none"))
    return folder / "save"


def _ended_like(expected, folder):
    expected, found = _load(expected.parent), _load(folder)
    assert found["optimizer_history"][-1]["num_updates"] == UPDATES
    same_bits(expected["model"], found["model"])
    same_bits(expected["last_optimizer_state"]["state"], found["last_optimizer_state"]["state"])
    assert facts_of(found) == facts_of(expected)


def test_ranks_that_are_started_again_beside_the_same_store_end_alike(lm_data, tmp_path, undisturbed):
    port = free_port()
    kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    words = lm_args(lm_data, tmp_path / "save", *SAVES, updates=UPDATES)
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "2"}
    codes = []
    for count in range(2):
        started = []
        for rank in range(2):
            env = {**torchrun_environment(rank, 2, port), **launcher, **_environment(tmp_path)}
            env["TORCHELASTIC_RESTART_COUNT"] = str(count)
            started += start("train", *words, env=env)
        run = wait(started)
        codes.append(run.exit_codes)
    assert codes == [[1, -signal.SIGKILL], [0, 0]], tail(run.output)
    assert "(epoch 1 @ 4 updates)" in run.output
    _ended_like(undisturbed, tmp_path)
    del kept


def _torchrun(words, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", *flags]
    return [str(word) for word in (*command, "-m", "fairseq_tutel.train", *words)]


@pytest.mark.long
def test_torchrun_starts_ranks_again(lm_data, tmp_path, undisturbed):
    words = lm_args(lm_data, tmp_path / "save", *SAVES, updates=UPDATES)
    flags = ("--nproc_per_node", 2, "--max-restarts", 2, "--master_port", free_port())
    done = subprocess.run(
        _torchrun(words, *flags), env={**os.environ, **_environment(tmp_path)}, cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, tail(output)
    assert (tmp_path / "fired").exists()
    assert "Loaded checkpoint" in output and "(epoch 1 @ 4 updates)" in output
    _ended_like(undisturbed, tmp_path)


@pytest.mark.long
def test_torchrun_goes_on_with_the_node_that_is_left(lm_data, tmp_path):
    """Two agents on one machine; the second one and its rank are killed."""
    words = lm_args(lm_data, tmp_path / "save", *SAVES, updates=100000)
    flags = (
        "--nnodes", "1:2", "--nproc_per_node", 1, "--max-restarts", 2,
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}",
    )  # fmt: skip
    env = {**os.environ, **_environment(tmp_path, what="none")}
    agents = []
    for node in range(2):
        # The first one keeps the store, and each waits so long for the other to come.
        own = ("--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=15")
        command = _torchrun(words, *flags, *own)
        with open(tmp_path / f"{node}.log", "w") as log:
            agents.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log))
    try:
        _wait_for(tmp_path / "save" / "checkpoint_last.pt", agents, 120)
        for pid in [*_children(agents[1].pid), agents[1].pid]:
            os.kill(pid, signal.SIGKILL)
        log = _wait_for_line(tmp_path / "0.log", "Loaded checkpoint", agents[0], 180)
        assert "rank 1 ended without an error message" in log
        assert "training on 2 devices" in log.partition("training on 1 devices")[0]
        assert "training on 1 devices" in log
    finally:
        for agent in agents:
            for pid in [*_children(agent.pid), agent.pid] if agent.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            agent.wait()


def _wait_for(path, agents, seconds):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents)
        time.sleep(0.2)


def _wait_for_line(path, line, agent, seconds):
    deadline = time.monotonic() + seconds
    while line not in (log := path.read_text()):
        assert time.monotonic() < deadline and agent.poll() is None, tail(log)
        time.sleep(0.2)
    return log


def _children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(child) for child in found.stdout.split()]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_finished_training_that_is_started_again_changes_no_file(lm_data, tmp_path, undisturbed, ranks):
    shutil.copytree(undisturbed, tmp_path / "save")
    saved = _files(tmp_path / "save")
    again = fairseq("train", *lm_args(lm_data, tmp_path / "save", updates=UPDATES), ranks=ranks)
    assert f"--max-update {UPDATES} is already reached" in again.output
    assert _files(tmp_path / "save") == saved


def test_a_finished_run_makes_the_last_copy_that_a_kill_prevented(lm_data, tmp_path, undisturbed):
    shutil.copytree(undisturbed, tmp_path / "save")
    last = tmp_path / "save" / "checkpoint_last.pt"
    content = last.read_bytes()
    last.unlink()
    again = fairseq("train", *lm_args(lm_data, tmp_path / "save", updates=UPDATES), ranks=2)
    assert f"--max-update {UPDATES} is already reached" in again.output
    assert last.read_bytes() == content


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        ("expert", ()),
        pytest.param("expert", ("--moe-expert-parallel-size", 1), marks=LONG),
        pytest.param("expert", ("--moe-checkpoint", "sharded"), marks=LONG),
        pytest.param("master", ("--moe-zero-stage", 1), marks=LONG),
        pytest.param("exp_avg_sq", ("--moe-zero-stage", 2), marks=LONG),
        pytest.param("master", ("--moe-offload-optimizer",), marks=LONG),
    ],
)
def test_what_one_rank_ruined_no_rank_saves(lm_data, tmp_path, undisturbed, what, flags):
    save_dir = tmp_path / "save"
    shutil.copytree(undisturbed, save_dir)
    saved = _files(save_dir)
    words = lm_args(lm_data, save_dir, *SAVES, "--user-dir", FAULTY, *flags, updates=10)
    fault = {"FAULT": f"update:2:{what}", "FAULT_RANK": "1"}
    _ends_on_all_ranks(words, fault, f"{save_dir}/checkpoint_last.pt (update 6).")
    assert {name for name in _files(save_dir) if name != "experts"} == set(saved)
    assert _load(tmp_path)["optimizer_history"][-1]["num_updates"] == UPDATES


@pytest.mark.long
@pytest.mark.parametrize("flags", [("--bf16",), ("--bf16", "--moe-zero-stage", 1)])
def test_no_rank_saves_a_ruined_master(lm_data, tmp_path, flags):
    words = lm_args(lm_data, tmp_path / "save", *SAVES, "--user-dir", FAULTY, *flags, updates=4)
    fault = {"FAULT": "update:2:master", "FAULT_RANK": "1"}
    _ends_on_all_ranks(words, fault, f"no checkpoint in {tmp_path}/save is complete and finite")
    assert os.listdir(tmp_path / "save") == []


def _ends_on_all_ranks(words, fault, end):
    run = wait(start("train", *words, ranks=2, env=fault))
    assert run.exit_codes == [1, 1]
    sentences = {log.splitlines()[-1] for log in run.logs}
    assert len(sentences) == 1
    assert " on rank 1 is NaN, infinite" in (sentence := sentences.pop())
    assert end in sentence


@pytest.mark.long
def test_a_learning_rate_that_ruins_a_training_leaves_its_last_checkpoint(lm_data, tmp_path, undisturbed):
    shutil.copytree(undisturbed, tmp_path / "save")
    words = lm_args(lm_data, tmp_path / "save", "--save-interval-updates", 1, updates=UPDATES + 2)
    for _ in range(2):
        sentence = refused("train", *words, "--lr", 1e30, "--reset-lr-scheduler").splitlines()[-1]
        assert "after update 7, " in sentence
        assert sentence.endswith("/checkpoint_last.pt (update 6).")
    assert fairseq("train", *words).stats("train")[-1]["train_num_updates"] == "8"
