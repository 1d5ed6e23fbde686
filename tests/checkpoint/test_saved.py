"""The class SavedModel opens, edits and writes full and sharded checkpoints."""

import argparse

import pytest
import torch
from moe_files import load, save
from tool_in_process import convert

from fairseq_tutel.checkpoint.saved import SavedModel, layer_label, write_all


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "a.pt", layers=("decoder.layers.0!", "decoder.layers.1"))


@pytest.mark.parametrize("keep_shards", [False, True])
def test_saved_experts_are_found_by_their_global_ids(keep_shards, path, tmp_path):
    convert("sharded", "--input", path, "--output", tmp_path / "b.pt")
    saved = SavedModel.open(tmp_path / "b.pt", keep_shards=keep_shards)
    dense, moe = saved.layers
    assert (dense.label, dense.has_experts) == ("decoder_0", False)
    assert (moe.label, moe.has_experts, saved.num_experts(moe)) == ("decoder_1", True, 4)
    expected = load(path)["model"]
    for expert in range(4):
        for name, tensor in saved.expert(moe, expert).items():
            assert torch.equal(tensor, expected[f"decoder.layers.1.fc1.experts.{name}"][expert])
    found = saved.dense_ffn(dense)
    assert torch.equal(found["fc1.weight"], expected["decoder.layers.0.fc1.weight"])
    saved.write(tmp_path / "c.pt")
    written = load(tmp_path / "c.pt")["model"]
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_model_name_and_options_can_be_edited_in_both_configuration_formats(path):
    new = SavedModel.open(path)
    flat = argparse.Namespace(arch="moe_transformer_lm", task="moe_language_modeling", moe_top_k=2)
    old = SavedModel({**new.state, "args": flat, "cfg": None})
    for saved in (new, old):
        assert saved.name("model") == "moe_transformer_lm"
        saved.rename("model", "transformer_lm")
        saved.drop(["moe_top_k", "moe_exchange"])
        assert saved.name("model") == "transformer_lm"
        assert "moe_top_k" not in saved.options


def test_a_checkpoint_for_a_new_run_has_the_optimizer_history_but_no_optimizer_state(path):
    saved = SavedModel.open(path)
    saved.restart()
    assert "last_optimizer_state" not in saved.state
    assert saved.state["optimizer_history"] == [{"num_updates": 9}]
    (place,) = saved.state["extra_state"].values()  # The only entry is the data position.
    assert place["epoch"] == 1


def test_layer_labels_shorten_the_names_of_modules():
    assert layer_label("stages.2.blocks.1.fc1") == "stages_2_1"
    assert layer_label("models.de-en.decoder.layers.3.fc1") == "de-en_decoder_3"


def test_several_checkpoint_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("a", "b")]
    paths[0].write_text("older")
    save_to, calls = torch.save, []

    def fails_second(content, file):
        calls.append(file)
        if len(calls) == 2:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save_to(content, file)

    monkeypatch.setattr(torch, "save", fails_second)
    with pytest.raises(ValueError, match=r"b could not be written \(No space left.*free disk space"):
        write_all((path, {}) for path in paths)
    assert paths[0].read_text() == "older"
    assert list(tmp_path.iterdir()) == [paths[0]]
