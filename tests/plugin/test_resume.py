"""The checkpoint from which a training run resumes; without checkpoint_last.pt, the newest complete one."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_tutel import plugin
from fairseq_tutel.plugin.training.resume import check_checkpoint, flag_and_path
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


def checked(cfg):
    """Return the path from which a checked run resumes, or None if there is no file."""
    check_checkpoint(cfg)
    path = flag_and_path(cfg)[1]
    return path if os.path.exists(path) else None


@pytest.mark.parametrize("given", ["by default", "by its name"])
def test_the_newest_complete_checkpoint_replaces_a_missing_last_one(tmp_path, caplog, given):
    whole = save(tmp_path, "checkpoint_1_4.pt", 4)
    for number, name in enumerate(["checkpoint_best.pt", "checkpoint1.pt", "checkpoint_1_3.pt"], 1):
        save(tmp_path, name, number)
    save(tmp_path, "checkpoint_2_9.pt", 9, a=RECORD)  # its shard files are missing
    truncated = save(tmp_path, "checkpoint_1_8.pt", 8)
    os.truncate(truncated, os.path.getsize(truncated) - 1)
    damaged = Path(save(tmp_path, "checkpoint_1_7.pt", 7, a=torch.ones(9)))
    ones, twos = (torch.full((9,), n).numpy().tobytes() for n in (1.0, 2.0))
    damaged.write_bytes(damaged.read_bytes().replace(ones, twos))
    for name in ("averaged.pt", "checkpoint_averaged.pt", "crash.pt"):
        save(tmp_path, name, 20)
    os.utime(whole, (1, 1))
    last = str(tmp_path / "checkpoint_last.pt")
    cfg = config(tmp_path, **({"restore_file": last} if given == "by its name" else {}))
    assert checked(cfg) == cfg.restore_file == whole
    expected = "there is no .*checkpoint_last.pt, so training resumes from checkpoint_1_4.pt .update 4."
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(expected, caplog.text)


def test_a_folder_with_only_corrupt_checkpoints_is_refused(tmp_path):
    truncated = save(tmp_path, "checkpoint_1_8.pt", 8)
    os.truncate(truncated, 100)
    with pytest.raises(ValueError, match="its 1 other checkpoints are corrupt; give another --save"):
        checked(config(tmp_path))


def test_a_damaged_last_checkpoint_is_refused(tmp_path):
    last, older = (
        save(tmp_path, "checkpoint_last.pt", 9, a=torch.ones(9)),
        save(tmp_path, "checkpoint1.pt", 8),
    )
    ones, twos = (torch.full((9,), n).numpy().tobytes() for n in (1.0, 2.0))
    Path(last).write_bytes(Path(last).read_bytes().replace(ones, twos))
    with pytest.raises(ValueError, match=f"give an older checkpoint, such as --restore-file {older}"):
        check_checkpoint(config(tmp_path))


@pytest.mark.parametrize("flag", ["finetune_from_model", "continue_once"])
def test_a_pretrained_model_is_used_only_at_the_first_start(tmp_path, flag):
    folder = tmp_path / "save"
    folder.mkdir()
    begin = save(tmp_path, "pretrained.pt", 100)
    cfg = config(folder, **{flag: begin})
    assert checked(cfg) == begin
    saved = save(folder, "checkpoint_1_4.pt", 4)
    assert checked(cfg) == saved
    assert (cfg.restore_file, getattr(cfg, flag)) == (saved, None)
    # The user named a file of the save folder, so it is used although there are newer ones.
    shutil.copy(begin, folder / "checkpoint_best.pt")
    cfg = config(folder, **{flag: str(folder / "checkpoint_best.pt")})
    assert checked(cfg) == str(folder / "checkpoint_best.pt")
    assert cfg.restore_file == "checkpoint_last.pt"


def test_a_checkpoint_that_the_user_names_is_used(tmp_path):
    save(tmp_path, "checkpoint_1_4.pt", 4)
    older = save(tmp_path, "checkpoint_1_2.pt", 2)
    assert checked(config(tmp_path, restore_file=older)) == older
    last = save(tmp_path, "checkpoint_last.pt", 1)
    assert checked(config(tmp_path)) == last


@pytest.mark.parametrize("others", [[], ["checkpoint_averaged.pt"]])
def test_an_empty_folder_starts_from_scratch(tmp_path, others):
    for name in others:
        save(tmp_path, name, 3)
    assert checked(config(tmp_path)) is None
    assert checked(config(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("flag", ["restore_file", "finetune_from_model", "continue_once", None])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_checkpoint_path_that_is_not_a_file_is_refused(tmp_path, flag, kind):
    save(tmp_path, "checkpoint_1_4.pt", 4) if flag is None else None
    path = tmp_path / ("given.pt" if flag else "checkpoint_last.pt")
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        os.mkfifo(path)
    cfg = config(tmp_path, **({flag: str(path)} if flag else {}))
    with pytest.raises(ValueError, match=f"is {path}, which is a folder, .*; give a checkpoint file"):
        checked(cfg)


def run_config(folder, sharded=False, **options):
    distributed = SimpleNamespace(use_sharded_state=sharded)
    return SimpleNamespace(checkpoint=config(folder, **options), distributed_training=distributed)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_training_run_chooses_its_file_before_main(tmp_path, sharded):
    saved = save(tmp_path, "checkpoint_1_4.pt", 4)
    cfg = run_config(tmp_path, sharded)
    begun = run_training(lambda cfg: cfg.checkpoint.restore_file, cfg)
    assert begun == ("checkpoint_last.pt" if sharded else saved)
