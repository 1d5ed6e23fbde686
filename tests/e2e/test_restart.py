"""If a launcher restarts the ranks, training resumes, and the final weights are those of a run without
a restart."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from cli import ROOT, fairseq, start, tail, torchrun_environment, wait
from equality import facts_of, same_bits
from faults.trial import PLACES, Trial, environment
from models import lm_args
from ports import free_port

SAVES = ("--save-interval-updates", 2, "--dropout", 0.1, "--user-dir", PLACES)
UPDATES = 6
KILLED = Trial(what="kill", place="train", when=5, rank=1)


def _load(folder):
    return torch.load(folder / "save" / "checkpoint_last.pt", weights_only=False)


@pytest.fixture(scope="module")
def undisturbed(lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    words = lm_args(lm_data, folder / "save", *SAVES, updates=UPDATES)
    fairseq("train", *words, ranks=2, env=environment(folder, Trial()))
    return folder / "save"


def _ended_like(expected, folder):
    expected, found = _load(expected.parent), _load(folder)
    assert found["optimizer_history"][-1]["num_updates"] == UPDATES
    same_bits(expected["model"], found["model"])
    same_bits(expected["last_optimizer_state"]["state"], found["last_optimizer_state"]["state"])
    assert facts_of(found) == facts_of(expected)


def test_restarted_ranks_end_with_the_weights_of_an_undisturbed_run(lm_data, tmp_path, undisturbed):
    port = free_port()
    kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    words = lm_args(lm_data, tmp_path / "save", *SAVES, updates=UPDATES)
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "2"}
    codes = []
    for count in range(2):
        started = []
        for rank in range(2):
            env = {**torchrun_environment(rank, 2, port), **launcher, **environment(tmp_path, KILLED)}
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
def test_torchrun_restarts_the_ranks_after_one_is_killed(lm_data, tmp_path, undisturbed):
    words = lm_args(lm_data, tmp_path / "save", *SAVES, updates=UPDATES)
    flags = ("--nproc_per_node", 2, "--max-restarts", 2, "--master_port", free_port())
    done = subprocess.run(
        _torchrun(words, *flags), env={**os.environ, **environment(tmp_path, KILLED)}, cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, tail(output)
    assert (tmp_path / "fired").exists()
    assert "Loaded checkpoint" in output and "(epoch 1 @ 4 updates)" in output
    _ended_like(undisturbed, tmp_path)


def test_restarting_a_finished_run_changes_no_checkpoint(lm_data, tmp_path, undisturbed):
    shutil.copytree(undisturbed, tmp_path / "save")
    files = list((tmp_path / "save").glob("*.pt"))
    saved = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files]
    again = fairseq("train", *lm_args(lm_data, tmp_path / "save", updates=UPDATES))
    assert f"--max-update {UPDATES} is already reached" in again.output
    assert [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files] == saved


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        ("expert", ()),
        pytest.param("master", ("--bf16", "--moe-zero-stage", 1), marks=pytest.mark.long),
        pytest.param("exp_avg_sq", ("--moe-zero-stage", 2), marks=pytest.mark.long),
    ],
)
def test_no_rank_saves_a_checkpoint_if_one_rank_has_a_nan(lm_data, tmp_path, what, flags):
    words = lm_args(lm_data, tmp_path / "save", *SAVES, *flags, updates=6)
    trial = Trial(what=what, place="update", when=4, rank=1)
    run = wait(start("train", *words, ranks=2, env=environment(tmp_path, trial)))
    assert run.exit_codes == [1, 1]
    (sentence,) = {log.splitlines()[-1] for log in run.logs}
    assert " on rank 1 is NaN, infinite" in sentence
    assert _load(tmp_path)["optimizer_history"][-1]["num_updates"] == 2
