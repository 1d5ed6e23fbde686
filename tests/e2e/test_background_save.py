"""Background saves write the same sharded checkpoints as blocking saves."""

import pytest
import torch
from cli import fairseq, start, tail, wait
from equality import same_bits
from faults.trial import PLACES, Trial, environment
from models import lm_args
from test_sharded_checkpoints import SHARDED, load

from fairseq_tutel.parallel.signals import EXIT_CODE

ASYNC = (*SHARDED, "--moe-save-async")
LONG = pytest.mark.long
KEPT = ("--keep-interval-updates", 2, "--keep-best-checkpoints", 2)


def _words(data, folder, *flags):
    saves = ("--save-interval-updates", 2, "--dropout", 0.1, "--user-dir", PLACES)
    return lm_args(data, folder / "save", *saves, *flags, updates=7)


def _train(data, folder, ranks, *flags):
    return fairseq("train", *_words(data, folder, *flags), ranks=ranks, env=environment(folder, Trial()))


def _same(one, two, name="checkpoint_last.pt"):
    a, b = load(one / "save", name), load(two / "save", name)
    same_bits(a["model"], b["model"])
    same_bits(a["last_optimizer_state"]["state"], b["last_optimizer_state"]["state"])
    for key in ("train_iterator", "val_loss", "best"):
        assert a["extra_state"][key] == b["extra_state"][key]


FLAGS = {
    "kept": (2, KEPT),
    "expert shards": (4, ("--moe-expert-count", 2, "--moe-expert-parallel-size", 4)),
    "offload": (2, ("--moe-zero-stage", 2, "--moe-offload-optimizer", "--bf16")),
}


@pytest.fixture(scope="module")
def in_background(lm_data, tmp_path_factory):
    """Return a function that trains with background saves and returns the folder of the run."""
    folders = {}

    def of(case):
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("background")
            ranks, flags = FLAGS[case]
            run = _train(lm_data, folders[case], ranks, *ASYNC, *flags)
            assert "saving a checkpoint of update 6 in the background" in run.logs[0]
        return folders[case]

    return of


@pytest.mark.parametrize("case", [pytest.param(c, marks=[LONG] * (c != "kept")) for c in FLAGS])
def test_a_background_save_writes_the_same_files_as_a_blocking_save(lm_data, tmp_path, in_background, case):
    ranks, flags = FLAGS[case]
    _train(lm_data, tmp_path, ranks, *SHARDED, *flags)
    names = [sorted(path.name for path in (f / "save").iterdir()) for f in (tmp_path, in_background(case))]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".pt"):
            _same(tmp_path, in_background(case), name)


# A --user-dir that delays the writing of experts until update 4 is done.
SLOW = """
import threading
from fairseq.trainer import Trainer
from fairseq_tutel.plugin import register
register()
from fairseq_tutel.checkpoint import experts
write, train_step, trained = experts.write_file, Trainer.train_step, threading.Event()
def write_slowly(*args):
    trained.wait(60)
    write(*args)
def train(self, *args, **kwargs):
    logged = train_step(self, *args, **kwargs)
    if self.get_num_updates() == 4:
        trained.set()
    return logged
experts.write_file, Trainer.train_step = write_slowly, train
"""


def test_training_continues_while_threads_write_a_checkpoint(lm_data, tmp_path):
    """While a thread writes the checkpoint of update 2, training continues without changing this
    checkpoint."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "__init__.py").write_text(SLOW)
    flags = (*ASYNC, "--user-dir", tmp_path / "slow", "--disable-validation", "--max-update", 4)
    log = fairseq("train", *_words(lm_data, tmp_path, *flags)).logs[0]
    committed = log.index("Saved checkpoint")
    assert log.index("update 2 in the background") < log.index('"num_updates": "3"') < committed
    assert log.index("update 4 in the background") > committed  # the next save waits for the previous save
    first = torch.load(tmp_path / "save" / "checkpoint_1_2.pt", weights_only=False)
    assert first["optimizer_history"][-1]["num_updates"] == 2


FAULTS = {
    "kill of a writing thread": Trial(what="kill", place="shard", when=4, rank=1),
    "error of a thread": Trial(what="error", place="shard", when=4, rank=1),
    "full disk at a copy": Trial(what="full", place="copy", when=2),
    "signal": Trial(what="signal", place="shard", when=3, rank=1, number="SIGTERM"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[LONG] * (c != "kill of a writing thread")) for c in FAULTS]
)
def test_a_run_resumed_after_a_failed_save_equals_an_unbroken_run(lm_data, tmp_path, in_background, case):
    words, env = _words(lm_data, tmp_path, *ASYNC, *KEPT), environment(tmp_path, FAULTS[case])
    run = wait(start("train", *words, ranks=2, env=env))
    assert 0 not in run.exit_codes
    if case == "error of a thread":
        assert all("rank 1 could not write its experts to" in log for log in run.logs), tail(run.output)
    if case == "signal":
        assert run.exit_codes == [EXIT_CODE] * 2, tail(run.output)
    assert [load(tmp_path / "save", file.name) for file in (tmp_path / "save").glob("*.pt")]
    again = fairseq("train", *words, ranks=2, env=env)
    assert "Loaded checkpoint" in again.output
    _same(in_background("kept"), tmp_path)
    assert not list((tmp_path / "save").rglob("*.tmp"))
