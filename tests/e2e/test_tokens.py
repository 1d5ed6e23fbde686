"""The page of experts of tokens, by its command, for every kind of model."""

import json
import re

import numpy as np
import pytest
import torch
from cli import fairseq
from corpora import translation
from models import dense_lm_args, lm_args, mt_args
from test_multilingual import MODEL
from test_vision import swin_args
from tool_in_process import refusal_of

import fairseq_tutel as ft


def page(path, *words):
    """Run the command; return what the page has."""
    run = fairseq("tutel-__main__", "tokens", *words, "--output", path)
    assert f"wrote {path}" in run.output
    return json.loads(re.search(r'id="content">(.*?)</script>', path.read_text(), re.S)[1])


@pytest.mark.parametrize("form", ("full", "sharded"))
def test_a_translation_model_s_tokens_have_the_experts_of_the_gate(mt_data, tmp_path, form):
    save = tmp_path / "save"
    fairseq("train", *mt_args(mt_data, save, "--moe-checkpoint", form, updates=2))
    found = page(tmp_path / "page.html", save, mt_data, "--limit", 5)
    assert [layer["name"] for layer in found["layers"]] == [
        f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in (0, 1)
    ]
    first = found["samples"][0]
    assert (first["side"], first["tokens"][-1]) == ("encoder", "</s>")
    opened = ft.from_checkpoint(save, mt_data)
    opened.task.load_dataset("valid")
    tokens = opened.task.dataset("valid")[0]["source"]
    seen, (model,) = [], opened.models
    layer = model.encoder.layers[0].fc1
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0]))
    model.encoder(tokens[None], torch.tensor([len(tokens)]))
    logits_TE = seen[0] @ layer.gate.weight.T
    assert first["experts"]["encoder.layers.0.fc1"] == logits_TE.topk(2).indices.tolist()


def test_texts_are_translated_and_continued(mt_data, lm_data, tmp_path):
    fairseq("train", *mt_args(mt_data, tmp_path / "mt", updates=2))
    fairseq("train", *lm_args(lm_data, tmp_path / "lm", updates=2))
    text = (mt_data / "test.de").read_text() if (mt_data / "test.de").exists() else "a b"
    found = page(tmp_path / "mt.html", tmp_path / "mt", mt_data, "--text", text, "--text", "b")
    assert [sample["side"] for sample in found["samples"]] == ["encoder", "decoder"] * 2
    found = page(tmp_path / "lm.html", tmp_path / "lm", lm_data, "--text", "a b")
    (only,) = found["samples"]
    assert only["tokens"][0] == "</s>" and len(only["experts"]["decoder.layers.1.fc1"]) == len(
        only["tokens"]
    )


def test_language_pairs_have_loads_of_their_own(tmp_path):
    data, save = translation(tmp_path), tmp_path / "save"
    fairseq("train", *mt_args(data, save, *MODEL, updates=2))
    found = page(tmp_path / "page.html", save, data)
    shared = found["layers"][0]
    assert shared["tables"]["language"]["labels"] == ["de", "en"]


def test_patches_of_images_have_experts(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "valid"):
        pixels = rng.integers(0, 255, (22, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=pixels, labels=np.arange(22) % 3)
    fairseq("train", *swin_args(tmp_path, tmp_path / "save"))
    found = page(tmp_path / "page.html", tmp_path / "save", tmp_path, "--limit", 4)
    assert len(found["samples"]) == 4
    sample, layer = found["samples"][0], found["layers"][0]
    assert sample["height"] == 8 and len(sample["experts"][layer["key"]]) in (4, 16, 64)
    assert {token for tokens in layer["typical"] for token, _ in tokens} <= {"0", "1", "2"}


def test_a_dense_model_has_no_page(lm_data, tmp_path):
    fairseq("train", *dense_lm_args(lm_data, tmp_path / "save", updates=1))
    sentence = refusal_of("tokens", tmp_path / "save", lm_data, "--output", tmp_path / "page.html")
    assert "which has no experts; give that of a MoE model." in sentence
