"""A checkpoint that would run code or never end is refused by every command, in one sentence.

Covered: code in options that fairseq evaluates, in all commands, Python, the teacher and safetensors;
pipes, sockets and links that lead nowhere in the place of a checkpoint.
"""

import os
import shutil
import socket

import pytest
import torch
from cli import USER_DIR, fairseq, refused
from fairseq.hub_utils import from_pretrained
from models import lm_args
from tool_in_process import convert

import fairseq_tutel

CODE = "[500+0*__import__('os').system('touch {}'),1000]"
SENTENCE = "as its option {}, which fairseq would run as code; give a file with a literal there"


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


@pytest.mark.parametrize(
    "command",
    ["eval-lm", "validate", "generate", "interactive"],
)  # fmt: skip
def test_a_command_that_uses_a_model_runs_no_code_of_its_options(good, lm_data, tmp_path, command):
    bad = with_code(good, tmp_path)
    task = () if command == "eval-lm" else ("--task", "moe_language_modeling")
    more = ("--criterion", "moe_cross_entropy", "--batch-size", 4) if command == "validate" else ()
    output = refused(command, lm_data, "--user-dir", USER_DIR, "--path", bad, *task, *more)
    assert SENTENCE.format("adaptive_softmax_cutoff") in output.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "flag", ["--distill-teacher", "--restore-file", "--continue-once", "--finetune-from-model"]
)
def test_a_training_runs_no_code_of_a_file(good, lm_data, tmp_path, flag):
    bad = with_code(good, tmp_path, "adam_betas", "optimizer")
    criterion = ("--criterion", "moe_distillation") if flag == "--distill-teacher" else ()
    output = refused("train", *lm_args(lm_data, tmp_path / "new", *criterion, flag, bad))
    assert SENTENCE.format("adam_betas") in output.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


def test_python_runs_no_code_of_a_file(good, lm_data, tmp_path):
    bad = with_code(good, tmp_path)
    convert("safetensors", "--input", bad, "--output", tmp_path / "folder")
    back = tmp_path / "back.pt"
    convert("from-safetensors", "--input", tmp_path / "folder", "--output", back)
    for file in (bad, back):
        with pytest.raises(ValueError, match="as its option adaptive_softmax_cutoff, which"):
            fairseq_tutel.from_checkpoint(file, lm_data)
        with pytest.raises(ValueError, match="as its option adaptive_softmax_cutoff, which"):
            from_pretrained(str(tmp_path), file.name, str(lm_data), user_dir=USER_DIR)
    assert not (tmp_path / "ran").exists()


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize(
    ("flag", "make"),
    [
        ("--finetune-from-model", make_pipe),
        ("--restore-file", make_socket),
        ("--continue-once", make_pipe),
        (None, make_pipe),
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


def test_a_command_that_uses_a_model_waits_for_no_pipe(lm_data, tmp_path):
    make_pipe(tmp_path / "pipe.pt")
    for path, kind in ((tmp_path / "pipe.pt", "a pipe, device or socket"), (tmp_path, "a folder")):
        output = refused("eval-lm", lm_data, "--user-dir", USER_DIR, "--path", path)
        assert output.splitlines()[-1].endswith(f"{path} is {kind}, not a checkpoint; give a file.")
