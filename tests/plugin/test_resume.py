"""Which checkpoint a training goes on from where checkpoint_last.pt is not there: the newest whole one."""

import errno
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_tutel import plugin
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.resume import checkpoint_to_load
from fairseq_tutel.plugin.training.save import run_training

plugin.register()
RECORD = {
    "expert_shards": 1, "folder": "experts/0123456789abcdef", "shape": [1, 2], "dtype": "float32",
    "slices": [1, 0], "pieces": [["a.safetensors", "0.a", "00"]],
}  # fmt: skip


def save(folder, name, updates, **more):
    path = folder / name
    torch.save({"model": more, "optimizer_history": [{"num_updates": updates}]}, path)
    return str(path)


def config(folder, **options):
    stock = {
        "restore_file": "checkpoint_last.pt", "finetune_from_model": None, "continue_once": None,
        "checkpoint_suffix": "", "no_save": False, "no_last_checkpoints": False,
    }  # fmt: skip
    return SimpleNamespace(save_dir=str(folder), **{**stock, **options})


@pytest.mark.parametrize("given", ["by default", "by its name"])
def test_the_newest_whole_checkpoint_stands_in_for_the_last(tmp_path, caplog, given):
    whole = save(tmp_path, "checkpoint_1_4.pt", 4)
    for number, name in enumerate(["checkpoint_best.pt", "checkpoint1.pt", "checkpoint_1_3.pt"], 1):
        save(tmp_path, name, number)
    save(tmp_path, "checkpoint_2_9.pt", 9, a=RECORD)  # its shards are gone
    torn = save(tmp_path, "checkpoint_1_8.pt", 8)
    os.truncate(torn, os.path.getsize(torn) - 1)
    damaged = Path(save(tmp_path, "checkpoint_1_7.pt", 7, a=torch.ones(9)))
    ones, twos = (torch.full((9,), n).numpy().tobytes() for n in (1.0, 2.0))
    damaged.write_bytes(damaged.read_bytes().replace(ones, twos))
    for name in ("averaged.pt", "checkpoint_averaged.pt", "crash.pt"):
        save(tmp_path, name, 20)
    os.utime(whole, (1, 1))
    last = str(tmp_path / "checkpoint_last.pt")
    cfg = config(tmp_path, **({"restore_file": last} if given == "by its name" else {}))
    assert checkpoint_to_load(cfg) == whole
    assert cfg.restore_file == whole
    said = "there is no .*checkpoint_last.pt, so training resumes from checkpoint_1_4.pt .update 4."
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(said, caplog.text)


def test_what_was_saved_after_the_last_checkpoint_is_newer(tmp_path, caplog):
    last = save(tmp_path, "checkpoint_last.pt", 10)
    time.sleep(0.02)  # a file system's clock has steps
    newer = save(tmp_path, "checkpoint_1_20.pt", 20)
    cfg = config(tmp_path)
    assert checkpoint_to_load(cfg) == cfg.restore_file == newer
    assert "checkpoint_1_20.pt (update 20), which is newer than checkpoint_last.pt" in caplog.text
    assert checkpoint_to_load(config(tmp_path, restore_file=last)) == last
    os.truncate(newer, os.path.getsize(newer) - 1)
    assert checkpoint_to_load(config(tmp_path)) == last


@pytest.mark.parametrize("put", [shutil.copy, shutil.copy2, shutil.move])
def test_a_checkpoint_that_is_put_in_the_place_of_the_last_is_taken(tmp_path, put, caplog):
    older = save(tmp_path, "checkpoint_1_10.pt", 10)
    time.sleep(0.02)
    save(tmp_path, "checkpoint_1_20.pt", 20)
    time.sleep(0.02)
    last = str(tmp_path / "checkpoint_last.pt")
    put(older, last)
    assert checkpoint_to_load(config(tmp_path)) == last
    assert (
        "checkpoint_last.pt (update 10), although the folder has a checkpoint of update 20" in caplog.text
    )


def test_a_folder_of_torn_checkpoints_is_refused(tmp_path):
    torn = save(tmp_path, "checkpoint_1_8.pt", 8)
    os.truncate(torn, 100)
    with pytest.raises(ValueError, match="its 1 other checkpoints are corrupt; give another --save"):
        checkpoint_to_load(config(tmp_path))


@pytest.mark.parametrize("flag", ["finetune_from_model", "continue_once"])
def test_what_a_training_began_with_is_not_begun_with_again(tmp_path, flag):
    folder = tmp_path / "save"
    folder.mkdir()
    begin = save(tmp_path, "pretrained.pt", 100)
    cfg = config(folder, **{flag: begin})
    assert checkpoint_to_load(cfg) == begin
    saved = save(folder, "checkpoint_1_4.pt", 4)
    assert checkpoint_to_load(cfg) == saved
    assert (cfg.restore_file, getattr(cfg, flag)) == (saved, None)
    # A file of the same folder was chosen with the others in sight.
    shutil.copy(begin, folder / "checkpoint_best.pt")
    cfg = config(folder, **{flag: str(folder / "checkpoint_best.pt")})
    assert checkpoint_to_load(cfg) == str(folder / "checkpoint_best.pt")
    assert cfg.restore_file == "checkpoint_last.pt"


def test_a_checkpoint_that_is_named_is_taken(tmp_path):
    save(tmp_path, "checkpoint_1_4.pt", 4)
    older = save(tmp_path, "checkpoint_1_2.pt", 2)
    assert checkpoint_to_load(config(tmp_path, restore_file=older)) == older
    last = save(tmp_path, "checkpoint_last.pt", 1)
    assert checkpoint_to_load(config(tmp_path)) == last


@pytest.mark.parametrize("others", [[], ["checkpoint_averaged.pt"]])
def test_an_empty_folder_is_begun_in(tmp_path, others):
    for name in others:
        save(tmp_path, name, 3)
    assert checkpoint_to_load(config(tmp_path)) is None
    assert checkpoint_to_load(config(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("flag", ["restore_file", "finetune_from_model", "continue_once", None])
@pytest.mark.parametrize("kind", ["a pipe, device or socket", "a folder", "a link that leads"])
def test_what_is_no_file_is_not_begun_with(tmp_path, flag, kind):
    save(tmp_path, "checkpoint_1_4.pt", 4) if flag is None else None
    path = tmp_path / ("given.pt" if flag else "checkpoint_last.pt")
    if kind == "a folder":
        path.mkdir()
    elif kind == "a link that leads":
        path.symlink_to("nowhere")
    else:
        os.mkfifo(path)
    cfg = config(tmp_path, **({flag: str(path)} if flag else {}))
    with pytest.raises(ValueError, match=f"is {path}, which is {kind}.*; give a checkpoint file"):
        checkpoint_to_load(cfg)


def run_config(folder, sharded=False, **options):
    distributed = SimpleNamespace(use_sharded_state=sharded)
    return SimpleNamespace(checkpoint=config(folder, **options), distributed_training=distributed)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_training_run_chooses_its_file_before_main(tmp_path, sharded):
    saved = save(tmp_path, "checkpoint_1_4.pt", 4)
    cfg = run_config(tmp_path, sharded)
    begun = run_training(lambda cfg: (cfg.checkpoint.restore_file, RUN.checkpoint), cfg)
    assert begun == (("checkpoint_last.pt", None) if sharded else (saved, saved))
    assert RUN.checkpoint is None


@pytest.mark.parametrize("older", [True, False])
def test_a_run_that_saves_nothing_brings_the_last_checkpoint_up_to_date(tmp_path, caplog, older):
    """After a kill between the copies of a save, where --max-update or --max-epoch is reached."""
    caplog.set_level("INFO")
    last = tmp_path / "checkpoint_last.pt"
    if older:
        save(tmp_path, last.name, 6)
        time.sleep(0.02)
    newest = Path(save(tmp_path, "checkpoint_best.pt", 8))
    run_training(lambda cfg: None, run_config(tmp_path))
    assert last.read_bytes() == newest.read_bytes()
    assert "copied checkpoint_best.pt to checkpoint_last.pt, which was older or missing" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_best.pt", "checkpoint_last.pt"]
    inode = last.stat().st_ino
    run_training(lambda cfg: None, run_config(tmp_path))
    assert last.stat().st_ino == inode


@pytest.mark.parametrize(
    "options", [{"no_save": True}, {"no_last_checkpoints": True}, {"restore_file": "given"}, "saves"]
)
def test_the_last_checkpoint_is_not_replaced_if_the_user_or_a_save_decided(tmp_path, options):
    newest = save(tmp_path, "checkpoint_1_8.pt", 8)
    saves = options == "saves"
    options = {} if saves else options | ({"restore_file": newest} if "restore_file" in options else {})

    def main(cfg):
        RUN.update(num_saves=RUN.num_saves + saves)

    run_training(main, run_config(tmp_path, **options))
    assert not (tmp_path / "checkpoint_last.pt").exists()


def test_a_full_disk_at_this_copy_is_one_sentence(tmp_path, monkeypatch):
    save(tmp_path, "checkpoint_1_8.pt", 8)

    def fail(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(ValueError, match=r"checkpoint_last\.pt could not be written: No space left"):
        run_training(lambda cfg: None, run_config(tmp_path))
    assert os.listdir(tmp_path) == ["checkpoint_1_8.pt"]
