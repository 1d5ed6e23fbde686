"""Sharded checkpoints that threads write during training: equal bits and files, safe at any time."""

import json
import os
from pathlib import Path

import pytest
import torch
from cli import fairseq, refused, start, tail, wait
from equality import same_bits
from models import dense_lm_args, lm_args
from test_sharded_checkpoints import SHARDED, load

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.parallel.signals import EXIT_CODE

PLACES = str(Path(__file__).parents[1] / "faults" / "faulty_places")
ASYNC = (*SHARDED, "--moe-save-async")
LONG = pytest.mark.long
UPDATES = 9
SAVES = ("--save-interval-updates", 2, "--dropout", 0.1)


def _environment(folder, what="none", place="none", when=1, rank=0, detail=""):
    fault = {
        "what": what, "place": place, "when": when, "rank": rank, "marker": str(folder / "fired"),
        "save_dir": str(folder / "save"), "seconds": 0, "detail": detail, "fraction": 0.5,
    }  # fmt: skip
    return {"FAULT": json.dumps(fault)}


def _words(data, folder, *flags, updates=UPDATES):
    return lm_args(data, folder / "save", *SAVES, "--user-dir", PLACES, *flags, updates=updates)


def _train(data, folder, ranks, *flags):
    folder.mkdir(exist_ok=True)
    return fairseq("train", *_words(data, folder, *flags), ranks=ranks, env=_environment(folder))


def _files(folder):
    return sorted(path.name for path in (folder / "save").iterdir())


def _same(one, two, name="checkpoint_last.pt"):
    a, b = load(one / "save", name), load(two / "save", name)
    same_bits(a["model"], b["model"])
    same_bits(a["last_optimizer_state"]["state"], b["last_optimizer_state"]["state"])
    for key in ("train_iterator", "val_loss", "best"):
        assert a["extra_state"][key] == b["extra_state"][key]


FLAGS = {
    "experts": (2, ()),
    "alone": (1, ()),
    "replicas": (4, ("--moe-expert-parallel-size", 2)),
    "slices": (4, ("--moe-expert-count", 2, "--moe-expert-parallel-size", 4)),
    "zero": (2, ("--moe-zero-stage", 1)),
    "offload": (2, ("--moe-zero-stage", 2, "--moe-offload-optimizer", "--bf16")),
    "half": (2, ("--bf16",)),
    "weights": (2, ("--no-save-optimizer-state",)),
    "kept": (2, ("--keep-interval-updates", 2, "--keep-best-checkpoints", 2)),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[LONG] * (c not in ("kept",))) for c in FLAGS])
def test_files_and_bits_equal_those_of_a_save_that_blocks(lm_data, tmp_path, case):
    ranks, flags = FLAGS[case]
    blocking, background = tmp_path / "blocking", tmp_path / "background"
    _train(lm_data, blocking, ranks, *SHARDED, *flags)
    run = _train(lm_data, background, ranks, *ASYNC, *flags)
    assert "of copies in host memory during a save" in run.logs[0]
    assert "saving a checkpoint of update 8 in the background" in run.logs[0]
    assert _files(background) == _files(blocking)
    if case == "weights":
        same_bits(load(blocking / "save")["model"], load(background / "save")["model"])
        return
    for name in _files(blocking):
        if name.endswith(".pt"):
            _same(blocking, background, name)


def test_training_goes_on_while_threads_write(lm_data, tmp_path):
    """A thread that takes a second does not stop updates; the checkpoint has the weights of its update."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "__init__.py").write_text(
        "import time\nfrom fairseq_tutel.plugin import register\nregister()\n"
        "from fairseq_tutel.checkpoint import experts\nwrite = experts.write_file\n"
        "def write_slowly(*args):\n    time.sleep(1)\n    write(*args)\n"
        "experts.write_file = write_slowly\n"
    )
    run = fairseq("train", *_words(lm_data, tmp_path, *ASYNC, "--user-dir", slow, "--validate-interval", 9))
    log = run.logs[0]
    begun, committed = log.index("update 2 in the background"), log.index("Saved checkpoint")
    assert '"num_updates": "4"' in log[begun:committed]
    assert log.index("update 4 in the background") > committed  # the next save waits
    first = torch.load(tmp_path / "save" / "checkpoint_1_2.pt", weights_only=False)
    assert first["optimizer_history"][-1]["num_updates"] == 2


FAILS_WHILE_A_THREAD_WRITES = """
import time
from fairseq.trainer import Trainer
from fairseq_tutel.plugin import register
register()
from fairseq_tutel.checkpoint import experts
write, train_step = experts.write_file, Trainer.train_step
def write_slowly(*args):
    time.sleep({seconds})
    write(*args)
experts.write_file = write_slowly
def train_or_fail(self, samples):
    time.sleep(0.3)  # meanwhile, threads write
    if self.get_num_updates() == {update}:
        raise KeyError("an injected fault")
    return train_step(self, samples)
Trainer.train_step = train_or_fail
"""
PENDING = {  # after update 2
    "experts": {"seconds": 1, "update": 2},
    "rename": {"seconds": 0, "update": 3},  # the file is complete, but has its temporary name
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[LONG] * (c != "experts")) for c in PENDING])
def test_an_error_of_training_leaves_no_files_of_a_pending_save(lm_data, tmp_path, case):
    failing = tmp_path / "failing"
    failing.mkdir()
    (failing / "__init__.py").write_text(FAILS_WHILE_A_THREAD_WRITES.format(**PENDING[case]))
    flags = (*ASYNC, "--user-dir", failing, "--disable-validation")
    run = wait(start("train", *_words(lm_data, tmp_path, *flags), ranks=2))
    assert run.exit_codes == [1, 1] and "an injected fault" in run.output
    assert "update 2 in the background" in run.output
    left = {path.name for path in (tmp_path / "save").rglob("*")}
    assert left <= {folders.PARENT, "crash.pt"}


FAULTS = {
    "kill of a writing thread": ("kill", "shard", 4, 1),
    "kill of the main file": ("kill", "write", 2, 0),
    "kill before a rename": ("kill", "rename", 5, 0),
    "error of a thread": ("error", "shard", 4, 1, "disk"),
    "error in the main file": ("full", "write", 2, 0),
    "error in a copy of the file": ("full", "copy", 2, 0),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[LONG] * (c != "kill of a writing thread")) for c in FAULTS]
)
def test_a_failure_loses_one_checkpoint_at_most(lm_data, tmp_path, case):
    many = ("--moe-expert-count", 16) if "file" in case else ()
    words = _words(lm_data, tmp_path, *ASYNC, *many)
    run = wait(start("train", *words, ranks=2, env=_environment(tmp_path, *FAULTS[case])))
    assert 0 not in run.exit_codes
    if case == "error of a thread":
        assert all("rank 1 could not write its experts to" in log for log in run.logs), tail(run.output)
    files = list((tmp_path / "save").glob("*.pt"))
    assert [load(tmp_path / "save", file.name) for file in files]
    if FAULTS[case][0] != "kill":
        named = set().union(*map(folders.mentions, files))
        assert set(os.listdir(tmp_path / "save" / folders.PARENT)) == named
    if FAULTS[case][0] == "full":
        for log in run.logs:
            last = log.splitlines()[-1]
            assert last.startswith(f"error: {tmp_path}"), last
            assert last.count("could not be written: File too large") == last.count("checkpoint_") == 1
    again = fairseq("train", *words, ranks=2, env=_environment(tmp_path, *FAULTS[case]))
    assert "Loaded checkpoint" in again.output
    _train(lm_data, tmp_path / "unbroken", 2, *ASYNC, *many)
    _same(tmp_path / "unbroken", tmp_path)
    if FAULTS[case][0] == "kill" and FAULTS[case][3] == 0:  # otherwise the next runs remove the folder
        assert not list((tmp_path / "save").glob("*.tmp"))
        assert not list((tmp_path / "save" / folders.PARENT).glob(f"{folders.WRITING}-*"))


@LONG
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_waits_for_the_thread(lm_data, tmp_path, name):
    env = _environment(tmp_path, "signal", "shard", 3, 1, name)
    run = wait(start("train", *_words(lm_data, tmp_path, *ASYNC), ranks=2, env=env))
    assert run.exit_codes == [EXIT_CODE] * 2, tail(run.output)
    assert load(tmp_path / "save")["optimizer_history"][-1]["num_updates"] in (2, 3, 4, 5)
    fairseq("train", *_words(lm_data, tmp_path, *ASYNC), ranks=2, env=env)
    _train(lm_data, tmp_path / "unbroken", 2, *ASYNC)
    _same(tmp_path / "unbroken", tmp_path)


@LONG
def test_stock_s_flag_means_the_same(lm_data, tmp_path):
    run = _train(lm_data, tmp_path, 1, *SHARDED, "--write-checkpoints-asynchronously")
    assert "update 8 in the background" in run.output


@pytest.mark.parametrize(
    "flag", ["--write-checkpoints-asynchronously", pytest.param("--moe-save-async", marks=LONG)]
)
def test_a_full_checkpoint_is_refused(lm_data, tmp_path, flag):
    """fairseq itself would end with exit code 0 before it trains, if the package iopath is missing."""
    output = refused("train", *_words(lm_data, tmp_path, flag), env=_environment(tmp_path))
    assert f"error: {flag} is set, which needs --moe-checkpoint sharded; add" in output.splitlines()[-1]


@LONG
def test_a_dense_run_is_told_that_it_has_no_effect(lm_data, tmp_path):
    run = fairseq("train", *dense_lm_args(lm_data, tmp_path, *ASYNC, updates=1))
    assert "--moe-save-async True has no effect" in run.output


@LONG
def test_too_little_memory_is_refused(lm_data, tmp_path):
    poor = tmp_path / "poor"
    poor.mkdir()
    (poor / "__init__.py").write_text(
        "from fairseq_tutel.plugin import register\nregister()\n"
        "from fairseq_tutel.parallel import host_memory\nhost_memory.available = lambda: 1000\n"
    )
    output = refused("train", *_words(lm_data, tmp_path, *ASYNC, "--user-dir", poor), ranks=2)
    assert "--moe-save-async is set, which needs 0.00 GiB of host memory on" in output.splitlines()[-1]
    assert output.count("| train_inner |") == 1  # the first save would be after update 2
    assert not os.path.exists(tmp_path / "save" / "checkpoint_last.pt")
