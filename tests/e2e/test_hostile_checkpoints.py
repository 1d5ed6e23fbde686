"""A checkpoint that would run code or never end is refused by every command, in one sentence.

Most are long, since tests/plugin has the same cases in one process.
"""

import os
import re
import shutil
import socket

import pytest
import torch
from cli import USER_DIR, fairseq, refused, start, wait
from fairseq.hub_utils import from_pretrained
from models import dense_lm_args, lm_args
from tool_in_process import convert

import fairseq_tutel

CODE = "[500+0*__import__('os').system('touch {}'),1000]"
SENTENCE = "as the option {}, which fairseq would run as code; give a file in which the option is a literal"


@pytest.fixture(scope="module")
def good(lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    fairseq("train", *lm_args(lm_data, folder, updates=2))
    return folder / "checkpoint_last.pt"


def with_code(good, folder, key="adaptive_softmax_cutoff", part="model"):
    """Write a checkpoint whose option is code that makes the file `ran` beside it."""
    state = torch.load(good, weights_only=True)
    state["cfg"][part][key] = CODE.format(folder / "ran")
    torch.save(state, folder / "bad.pt")
    return folder / "bad.pt"


@pytest.mark.long
@pytest.mark.parametrize("command", ["eval-lm", "validate", "generate", "interactive"])
def test_a_command_that_uses_a_model_runs_no_code_of_its_options(good, lm_data, tmp_path, command):
    bad = with_code(good, tmp_path)
    task = () if command == "eval-lm" else ("--task", "moe_language_modeling")
    more = ("--criterion", "moe_cross_entropy", "--batch-size", 4) if command == "validate" else ()
    output = refused(command, lm_data, "--user-dir", USER_DIR, "--path", bad, *task, *more)
    assert SENTENCE.format("adaptive_softmax_cutoff") in output.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "flag", ["--distill-teacher", "--restore-file", "--continue-once", "--finetune-from-model"]
)
def test_a_training_runs_no_code_of_a_file(good, lm_data, tmp_path, flag):
    bad = with_code(good, tmp_path, "adam_betas", "optimizer")
    criterion = ("--criterion", "moe_distillation") if flag == "--distill-teacher" else ()
    output = refused("train", *lm_args(lm_data, tmp_path / "new", *criterion, flag, bad))
    assert SENTENCE.format("adam_betas") in output.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_python_runs_no_code_of_a_file(good, lm_data, tmp_path):
    bad = with_code(good, tmp_path)
    convert("safetensors", "--input", bad, "--output", tmp_path / "folder")
    back = tmp_path / "back.pt"
    convert("from-safetensors", "--input", tmp_path / "folder", "--output", back)
    for file in (bad, back):
        with pytest.raises(ValueError, match="as the option adaptive_softmax_cutoff, which"):
            fairseq_tutel.from_checkpoint(file, lm_data)
        with pytest.raises(ValueError, match="as the option adaptive_softmax_cutoff, which"):
            from_pretrained(str(tmp_path), file.name, str(lm_data), user_dir=USER_DIR)
    assert not (tmp_path / "ran").exists()


def make_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(here)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flag", "make"),
    [
        ("--finetune-from-model", os.mkfifo),
        ("--restore-file", make_socket),
        ("--continue-once", os.mkfifo),
        (None, os.mkfifo),
        (None, lambda path: path.symlink_to("nowhere")),
    ],
)
def test_a_training_begins_with_no_pipe(good, lm_data, tmp_path, flag, make):
    """A file of the name checkpoint_last.pt is the one to resume, whatever else is there."""
    path = tmp_path / "checkpoint_last.pt"
    if flag is None:
        shutil.copy(good, tmp_path / "checkpoint_1_2.pt")
    else:
        path = tmp_path / "given"
    make(path)
    given = (flag, path) if flag else ()
    output = refused("train", *lm_args(lm_data, tmp_path, *given))
    kind = "a link that leads nowhere" if path.is_symlink() else "a pipe, device or socket"
    sentence = f"{flag or '--restore-file'} is {path}, which is {kind}; give a checkpoint file."
    assert output.splitlines()[-1].endswith(sentence)


def test_a_dense_training_resumes_from_no_pipe(lm_data, tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    os.mkfifo(path)
    output = refused("train", *dense_lm_args(lm_data, tmp_path))
    sentence = f"--restore-file is {path}, which is a pipe, device or socket; give a checkpoint file."
    assert output.splitlines()[-1].endswith(sentence)


@pytest.mark.long
def test_a_dense_training_goes_on_from_the_newest_and_from_finite_state_alone(lm_data, tmp_path):
    words = dense_lm_args(lm_data, tmp_path, "--save-interval-updates", 1)
    fairseq("train", *words, "--max-update", 2)
    last = tmp_path / "checkpoint_last.pt"
    last.unlink()
    run = fairseq("train", *words, "--max-update", 3, ranks=2)
    assert "training resumes from checkpoint_best.pt (update 2)" in run.output
    for part in ("model", "exp_avg_sq"):
        last.write_bytes(with_infinity(tmp_path / "checkpoint_1_3.pt", tmp_path / "a", part))
        for ranks in (1, 2):
            output = refused("train", *words, "--max-update", 4, ranks=ranks)
            assert re.search(rf"{last}, in which .*(weight|{part}) .*is NaN", output)


def with_infinity(file, written, part):
    """Return the bytes of a checkpoint with infinity in its last tensor of a kind: the last expert's."""
    state = torch.load(file, weights_only=False)
    states = state["last_optimizer_state"]["state"]
    tensor = {
        "model": lambda: [v for k, v in state["model"].items() if k.endswith("weight")][-1],
        "expert": lambda: next(v for k, v in state["model"].items() if ".experts." in k),
    }.get(part, lambda: states[max(states)][part])()
    tensor.view(-1)[-1] = torch.inf
    torch.save(state, written)
    return written.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "flags"),
    [
        ("expert", ()),
        ("exp_avg_sq", ()),
        ("exp_avg_sq", ("--moe-zero-stage", 1)),
        ("fp32_master", ("--bf16",)),
        ("fp32_master", ("--bf16", "--moe-zero-stage", 1)),
        ("exp_avg_sq", ("--moe-offload-optimizer",)),
        ("shards", ("--moe-checkpoint", "sharded")),
        ("finetune", ()),
    ],
)
def test_no_rank_trains_on_from_infinity_that_one_of_them_loaded(lm_data, tmp_path, part, flags):
    words = lm_args(lm_data, tmp_path / "save", *flags, updates=2)
    fairseq("train", *words, "--moe-checkpoint", "full", ranks=2)
    bad = path = tmp_path / "save" / "checkpoint_last.pt"
    written = tmp_path / "written.pt"
    kind = {"shards": "expert", "finetune": "expert"}.get(part, part)
    bad.write_bytes(with_infinity(bad, written, kind))
    if part == "shards":
        bad.unlink()
        convert("sharded", "--input", written, "--output", bad)
    if part == "finetune":
        path = written
        words = lm_args(lm_data, tmp_path / "new", "--finetune-from-model", path)
    run = wait(start("train", *words, "--max-update", 4, ranks=2))
    assert run.exit_codes == [1, 1]
    sentences = {log.splitlines()[-1] for log in run.logs}
    assert len(sentences) == 1
    assert re.search(rf" is {path}, in which .* on rank [01] is NaN, infinite", *sentences)
    before = set(os.listdir(tmp_path / "save"))
    assert before == {"checkpoint_best.pt", "checkpoint_last.pt"} | before & {"experts"}


@pytest.mark.long
def test_a_command_that_uses_a_model_waits_for_no_pipe(lm_data, tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    for path, kind in ((tmp_path / "pipe.pt", "a pipe, device or socket"), (tmp_path, "a folder")):
        output = refused("eval-lm", lm_data, "--user-dir", USER_DIR, "--path", path)
        assert output.splitlines()[-1].endswith(f"{path} is {kind}, not a checkpoint; give a file.")
