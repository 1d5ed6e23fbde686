"""Tests which checkpoint files fairseq loads for inference or to resume training."""

import argparse
import logging
import os
import re
import sys

import pytest
import torch
from fairseq import checkpoint_utils, utils
from torch import nn

from fairseq_tutel import plugin
from fairseq_tutel.parallel.guard import CommunicationError
from fairseq_tutel.plugin.opening.offload import (
    for_loading,
    store_options,
)

plugin.register()
STATE = {
    "args": None,
    "cfg": {"model": {"moe_freq": 1, "moe_gate_type": "linear"}},
    "model": {"weight": torch.arange(5.0)},
    "optimizer_history": [{"num_updates": 1, "optimizer_name": "x", "lr_scheduler_state": {}}],
    "extra_state": {"epoch": 1, "train_iterator": {"epoch": 1}},
}


class Hostile:
    """An object that would create a folder if a program unpickled the object."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def written(folder, **parts):
    torch.save({**STATE, **parts}, folder / "a.pt")
    return folder / "a.pt"


def test_a_checkpoint_with_a_flipped_bit_opens_only_with_fairseq_tutel_open_damaged(tmp_path, monkeypatch):
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(STATE["model"]["weight"].numpy().tobytes()) + 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.pt .* is corrupt \(.*set FAIRSEQ_TUTEL_OPEN_DAMAGED=1"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path), {})
    monkeypatch.setenv("FAIRSEQ_TUTEL_OPEN_DAMAGED", "1")
    opened = checkpoint_utils.load_checkpoint_to_cpu(str(path), {})["model"]["weight"]
    assert not torch.equal(opened, STATE["model"]["weight"])


@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
@pytest.mark.parametrize(
    ("saved", "read"),
    [({"moe_backend": "grouped_mm"}, {"moe_backend": "auto"}), ({"data": "x"}, {"data": "x"})],
)
def test_a_removed_backend_in_a_checkpoint_is_read_as_auto(kind, saved, read, tmp_path):
    path = written(tmp_path, cfg={**STATE["cfg"], "task": kind(**saved)})
    assert checkpoint_utils.load_checkpoint_to_cpu(str(path), {})["cfg"]["task"] == kind(**read)


@pytest.mark.parametrize("words", [({},), (None, False)], ids=["to use", "to train on"])
@pytest.mark.parametrize("form", ["cfg", "args", "Namespace in cfg"])
def test_a_removed_option_in_a_checkpoint_is_ignored_and_logged(form, words, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    key, kept = "moe_kernel_tuning_seconds", {"moe_freq": 1, "moe_backend": "auto"}
    old = {**kept, key: 3.0}
    kind = dict if form == "cfg" else argparse.Namespace
    flat = argparse.Namespace(**old, arch="moe_transformer_lm", task="language_modeling")
    parts = {"args": flat} if form == "args" else {"cfg": {"model": kind(**old), "task": kind(**old)}}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(written(tmp_path, **parts)), *words)
    found = [options for options in (state["args"], state["cfg"]["model"], state["cfg"]["task"]) if options]
    assert [options for options in found if key in options] == []
    assert any("moe_backend" in options for options in found)
    assert [key in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("name", ["gate.wg.weight", "experts.3.fc1.weight"])
@pytest.mark.parametrize("resumes", [None, False], ids=["used", "trained"])
def test_the_error_for_a_checkpoint_of_meta_s_branch_names_the_converter(name, resumes, tmp_path):
    path = written(tmp_path, model={f"decoder.layers.0.moe_layer.{name}": torch.ones(2)})
    with pytest.raises(ValueError, match=r"convert meta"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path), {}, load_on_all_ranks=resumes)


def test_an_option_that_is_missing_in_an_older_checkpoint_can_be_overridden(tmp_path):
    path = written(tmp_path, cfg={**STATE["cfg"], "task": {"data": "x"}})
    overrides = {"moe_expert_store": "on-demand", "seed": 3}
    task = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)["cfg"]["task"]
    assert task == {"data": "x", "moe_expert_store": "on-demand"}


def test_the_pregated_store_is_refused_for_a_model_without_pregating():
    task = argparse.Namespace(moe_expert_store="pregated")
    assert store_options(task, True, True, torch.device("cpu")).moe_expert_tier == "disk"
    with pytest.raises(ValueError, match=r"^--moe-expert-store is pregated, but this model"):
        store_options(task, True, False, torch.device("cpu"))


FOREIGN = {
    "empty": b"",
    "text": b"no checkpoint",
    "a tensor": torch.ones(3),
    "a list": [1],
    "weights alone": {"model": {"weight": torch.ones(3)}},
    "code": {"model": Hostile("made")},
}


@pytest.mark.parametrize("words", [({},), (None, False)], ids=["to use", "to train on"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_the_error_for_a_file_that_is_no_checkpoint_names_the_file(kind, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, content = tmp_path / "a.pt", FOREIGN[kind]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} is not a checkpoint.*; give") as e:
        checkpoint_utils.load_checkpoint_to_cpu(str(path), *words)
    assert "\n" not in str(e.value)
    assert ("mkdir, which must not run" in str(e.value)) == (kind == "code")
    assert os.listdir() == ["a.pt"]


@pytest.mark.parametrize("words", [({},), (None, False)], ids=["to use", "to train on"])
def test_the_loader_refuses_code_in_an_option_and_paths_that_are_not_files(words, tmp_path):
    path = written(tmp_path, cfg={"model": {"adaptive_softmax_cutoff": "[500+0*print(),1000]"}})
    with pytest.raises(ValueError, match="as the option adaptive_softmax_cutoff, which"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path), *words)
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path, tmp_path / "pipe.pt"):
        with pytest.raises(ValueError, match=r"is a folder, pipe, .*, not a checkpoint; give a file"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path), *words)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Write two modules, one inside and one outside of a --user-dir."""
    source = "import torch\nopen('made', 'w').close()\nclass Gate(torch.nn.Linear): pass\n"
    (tmp_path / "my_user_dir").mkdir()
    (tmp_path / "my_user_dir" / "__init__.py").write_text("")
    (tmp_path / "my_user_dir" / "gates.py").write_text(source)
    (tmp_path / "aside.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    utils.import_user_module(argparse.Namespace(user_dir="my_user_dir"))
    yield
    for name in ("my_user_dir", "my_user_dir.gates", "aside"):
        sys.modules.pop(name, None)
    utils.import_user_module.memo.discard(str(tmp_path / "my_user_dir"))


@pytest.mark.parametrize("form", ["cfg", "args", "Namespace in cfg"])
@pytest.mark.parametrize("key", ["moe_gate_type", "moe_expert_type"])
def test_a_checkpoint_cannot_import_a_module_that_the_user_did_not_name(key, form, modules, tmp_path):
    options = {"moe_freq": 1, key: "linear, aside.Gate"}
    flat = argparse.Namespace(**options, arch="moe_transformer", task="translation")
    parts = {
        "cfg": {"cfg": {"model": options}},
        "args": {"args": flat},
        "Namespace in cfg": {"cfg": {"model": flat}},
    }[form]
    path = str(written(tmp_path, **parts))
    with pytest.raises(ValueError, match=r"a\.pt has the \w+_type \(--moe-.*-type\) aside\.Gate") as e:
        checkpoint_utils.load_checkpoint_to_cpu(path, {})
    assert f"--model-overrides \"{{'{key}': 'linear, aside.Gate'}}\"" in str(e.value)
    checkpoint_utils.load_checkpoint_to_cpu(path, {key: options[key]})
    # Training ignores model options in the checkpoint, because the command line defines the model.
    checkpoint_utils.load_checkpoint_to_cpu(path, load_on_all_ranks=False)
    assert not os.path.exists("made")
    __import__("aside")
    checkpoint_utils.load_checkpoint_to_cpu(path, {})


def test_a_checkpoint_may_name_a_class_in_the_user_dir(modules, tmp_path):
    options = {"moe_gate_type": "my_user_dir.gates.Gate", "moe_expert_type": "torch.nn.Linear"}
    path = written(tmp_path, cfg={"model": options})
    checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize(
    "error", [RuntimeError("can't allocate memory"), CommunicationError("rank 1 is gone")]
)
def test_memory_and_communication_errors_during_loading_are_raised_unchanged(error, tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise error

    path = written(tmp_path)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(type(error), match=str(error)):
        checkpoint_utils.load_checkpoint_to_cpu(str(path), load_on_all_ranks=False)


def test_weights_are_memory_mapped_for_inference_but_not_for_training(tmp_path):
    path = written(tmp_path, model={"weight": torch.zeros(2**16)})
    for resumes in (True, None):  # a run that resumes copies the weights into memory
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path), {}, load_on_all_ranks=resumes)
        with open("/proc/self/maps") as maps:
            assert (str(path) in maps.read()) == (resumes is None)
        assert not state["model"]["weight"].any()


def test_large_matrices_of_a_model_for_inference_are_not_initialized():
    cfg = argparse.Namespace(opened_for_use=True)
    before = torch.get_rng_state()
    with for_loading(cfg, None):
        nn.Embedding(2**10, 2**11)
        nn.Linear(2**11, 2**10, bias=False)
        nn.init.xavier_uniform_(torch.empty(2**10, 2**11))
    assert torch.equal(torch.get_rng_state(), before)
    with for_loading(cfg, None):
        nn.Linear(8, 8)
    assert not torch.equal(torch.get_rng_state(), before)
    before = torch.get_rng_state()
    with for_loading(argparse.Namespace(), None):
        nn.Linear(2**11, 2**10)
    assert not torch.equal(torch.get_rng_state(), before)
