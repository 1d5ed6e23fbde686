"""Tests of `fairseq-tutel tokens`, which writes a page with the experts of each token."""

import json
import re

import numpy as np
import pytest
import torch
from cli import fairseq
from corpora import translation
from models import lm_args, mt_args
from test_multilingual import MODEL
from test_vision import swin_args
from tool_in_process import refusal_of, tool

import browser
import fairseq_tutel as ft
import screenshots


def page(path, *words):
    """Run `fairseq-tutel tokens`; return the JSON content of the page."""
    assert tool("tokens", *words, "--output", path) == f"wrote {path}\n"
    return json.loads(re.search(r'id="content">(.*?)</script>', path.read_text(), re.S)[1])


def test_the_tool_tokens_refuses_several_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sentence = refusal_of("tokens", tmp_path, "--output", tmp_path / "page.html")
    assert sentence == "WORLD_SIZE is 2, but tokens needs one process; run it without torchrun."


@pytest.fixture(scope="module")
def translator(mt_data, tmp_path_factory):
    """The --save-dir of a translation model, with a sharded checkpoint that two ranks wrote."""
    save = tmp_path_factory.mktemp("translator")
    fairseq("train", *mt_args(mt_data, save, "--moe-checkpoint", "sharded", updates=2), ranks=2)
    return save


def test_the_tokens_page_has_the_experts_that_the_gate_chose(translator, mt_data, tmp_path):
    found = page(tmp_path / "page.html", translator, mt_data, "--limit", 5)
    assert [layer["name"] for layer in found["layers"]] == [
        f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in (0, 1)
    ]
    first = found["samples"][0]
    assert (first["side"], first["tokens"][-1]) == ("encoder", "</s>")
    opened = ft.from_checkpoint(translator, mt_data)
    opened.task.load_dataset("valid")
    tokens = opened.task.dataset("valid")[0]["source"]
    seen, (model,) = [], opened.models
    layer = model.encoder.layers[0].fc1
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0]))
    model.encoder(tokens[None], torch.tensor([len(tokens)]))
    logits_TE = seen[0] @ layer.gate.weight.T
    chosen_TK = logits_TE.topk(layer.config.top_k).indices
    assert first["experts"]["encoder.layers.0.fc1"] == chosen_TK.tolist()


def test_the_tokens_page_of_given_texts_also_has_their_translations(translator, mt_data, lm_data, tmp_path):
    fairseq("train", *lm_args(lm_data, tmp_path / "lm", "--disable-validation", updates=1))
    found = page(tmp_path / "mt.html", translator, mt_data, "--text", "w1 w2", "--text", "w3")
    assert [sample["side"] for sample in found["samples"]] == ["encoder", "decoder"] * 2
    model = ft.from_checkpoint(translator, mt_data)
    assert " ".join(found["samples"][1]["tokens"][1:]) == model.translate("w1 w2")
    (only,) = page(tmp_path / "lm.html", tmp_path / "lm", lm_data, "--text", "w1 w2")["samples"]
    assert only["tokens"][0] == "</s>"
    assert len(only["experts"]["decoder.layers.1.fc1"]) == len(only["tokens"])


def test_the_tokens_page_has_separate_expert_loads_for_each_language(tmp_path):
    data, save = translation(tmp_path), tmp_path / "save"
    fairseq("train", *mt_args(data, save, *MODEL, updates=2))
    found = page(tmp_path / "page.html", save, data)
    shared = found["layers"][0]
    assert shared["languages"] == ["de", "en"]


def test_the_tokens_page_of_an_image_model_has_experts_of_image_patches(tmp_path):
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
    words = ("tokens", tmp_path / "save", tmp_path, "--text", "a cat", "--output", tmp_path / "text.html")
    assert refusal_of(*words).endswith(", an image classifier; remove --text.")


REFUSED = {
    "no model": (("no.pt", "DATA"), "MODEL names {folder}/no.pt, which does not exist; give an existing "),
    "output exists": (("SAVE", "DATA", "--output", "old.html"), "--output old.html exists; give another "),
    "overrides": (("SAVE", "DATA", "--model-overrides", "{"), "--model-overrides is {{; give a dictionary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokens_refuses_bad_input_with_one_sentence(translator, mt_data, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.html").write_text("older")
    names = {"SAVE": translator, "DATA": mt_data}
    words, sentence = REFUSED[case]
    sentence = sentence.format(folder=tmp_path)
    assert refusal_of("tokens", *(names.get(word, word) for word in words)).startswith(sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]


@pytest.mark.long
@pytest.mark.skipif(browser.chromium() is None, reason="not run: needs Chromium")
def test_a_browser_shows_the_tokens_page_without_errors(mt_data, tmp_path):
    fairseq("train", *mt_args(mt_data, tmp_path / "save", "--moe-expert-count", 16, updates=2))
    path = tmp_path / "page.html"
    page(path, tmp_path / "save", mt_data)
    with browser.Browser(browser.chromium()) as chrome:
        taken = list(screenshots.taken(chrome, path, tmp_path, "tokens"))
    assert [problems for _, problems in taken] == [[]] * 4
