"""The page of experts of tokens, by its command, for every kind of model."""

import json
import re

import numpy as np
import pytest
import torch
from cli import fairseq, refused
from corpora import translation
from models import dense_lm_args, lm_args, mt_args
from test_multilingual import MODEL
from test_vision import swin_args
from tool_in_process import refusal_of, tool

import browser
import fairseq_tutel as ft
import screenshots


def page(path, *words):
    """Run the command; return what the page has."""
    run = fairseq("tutel-__main__", "tokens", *words, "--output", path)
    assert f"wrote {path}" in run.output
    return shown(path)


def shown(path):
    return json.loads(re.search(r'id="content">(.*?)</script>', path.read_text(), re.S)[1])


@pytest.mark.parametrize("form, ranks", (("full", 1), ("sharded", 2)))
def test_a_translation_model_s_tokens_have_the_experts_of_the_gate(mt_data, tmp_path, form, ranks):
    opens_in_one_process(mt_data, tmp_path, "--moe-checkpoint", form, ranks=ranks)


@pytest.mark.long
@pytest.mark.parametrize("form", ("full", "sharded"))
@pytest.mark.parametrize(
    "options",
    (
        ("--moe-expert-parallel-size", 2),
        ("--moe-expert-parallel-size", 1, "--moe-zero-stage", 2),
        ("--moe-expert-parallel-size", 2, "--moe-zero-stage", 1, "--moe-pregate", 1),
        ("--moe-expert-parallel-size", 2, "--moe-expert-count", 1, "--moe-top-k", 1),
    ),
)
def test_one_process_opens_the_checkpoints_of_two_ranks(mt_data, tmp_path, form, options):
    opens_in_one_process(mt_data, tmp_path, *options, "--moe-checkpoint", form, ranks=2)


def test_several_ranks_are_refused(tmp_path):
    output = refused("tutel-__main__", "tokens", tmp_path, "--output", tmp_path / "page.html", ranks=2)
    assert "error: WORLD_SIZE is 2, but tokens needs one process; run it without torchrun.\n" in output
    assert not list(tmp_path.iterdir())


def opens_in_one_process(mt_data, tmp_path, *options, ranks):
    """Train a model, and compare the first sentence on its page with the gate of its first layer."""
    save = tmp_path / "save"
    fairseq("train", *mt_args(mt_data, save, *options, updates=2), ranks=ranks)
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
    chosen_TK = logits_TE.topk(layer.config.top_k).indices
    assert first["experts"]["encoder.layers.0.fc1"] == chosen_TK.tolist()


def test_texts_are_translated_and_continued(mt_data, lm_data, tmp_path):
    fairseq("train", *mt_args(mt_data, tmp_path / "mt", updates=2))
    fairseq("train", *lm_args(lm_data, tmp_path / "lm", updates=2))
    found = page(tmp_path / "mt.html", tmp_path / "mt", mt_data, "--text", "w1 w2", "--text", "w3")
    assert [sample["side"] for sample in found["samples"]] == ["encoder", "decoder"] * 2
    found = page(tmp_path / "lm.html", tmp_path / "lm", lm_data, "--text", "w1 w2")
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
    words = ("tokens", tmp_path / "save", tmp_path, "--text", "a cat", "--output", tmp_path / "text.html")
    assert refusal_of(*words).endswith(", an image classifier; remove --text.")
    words = ("tokens", tmp_path / "save", tmp_path, "--split", "test", "--output", tmp_path / "text.html")
    assert refusal_of(*words).startswith("the images of test are read from ")


@pytest.fixture(scope="module")
def translator(mt_data, tmp_path_factory):
    """A --save-dir of a translation model."""
    save = tmp_path_factory.mktemp("translator")
    fairseq("train", *mt_args(mt_data, save, updates=1))
    return save


REFUSED = {
    "no model": (
        ("no.pt", "DATA"),
        "MODEL names {folder}/no.pt, which does not exist; give an existing file.",
    ),
    "no checkpoint": ((".", "DATA"), "MODEL names {folder}, a folder without checkpoint_best.pt or "),
    "no data": (("SAVE", "no"), "DATA is no, which is not a folder; give the folder of the data set."),
    "no split": (
        ("SAVE", "DATA", "--split", "nosuch"),
        "--split is nosuch, which {data} lacks; give another ",
    ),
    "empty text": (("SAVE", "DATA", "--text", " "), "--text is empty; give a sentence."),
    "unknown words": (
        ("SAVE", "DATA", "--text", "foo bar"),
        "--text is 'foo bar', of which the dictionary has no token; give text like that of the training ",
    ),
    "limit": (("SAVE", "DATA", "--limit", "0"), "--limit is 0; give a number of at least 1."),
    "no folder": (
        ("SAVE", "DATA", "--output", "no/a.html"),
        "--output is no/a.html; give the name of a file",
    ),
    "output exists": (
        ("SAVE", "DATA", "--output", "old.html"),
        "--output old.html exists; give another name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_ends_with_one_sentence(translator, mt_data, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.html").write_text("older")
    names = {"SAVE": translator, "DATA": mt_data}
    words, sentence = REFUSED[case]
    sentence = sentence.format(data=mt_data, folder=tmp_path)
    assert refusal_of("tokens", *(names.get(word, word) for word in words)).startswith(sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]


def test_a_model_whose_data_folder_is_gone_needs_another(translator, tmp_path):
    saved = torch.load(translator / "checkpoint_last.pt", weights_only=False)
    saved["cfg"]["task"]["data"] = str(tmp_path / "gone")
    torch.save(saved, tmp_path / "model.pt")
    sentence = refusal_of("tokens", tmp_path / "model.pt", "--output", tmp_path / "page.html")
    assert sentence.endswith("gone, which does not exist; give the data folder as DATA.")


def test_unknown_words_are_counted(translator, mt_data, tmp_path):
    path = tmp_path / "page.html"
    words = ("tokens", translator, mt_data, "--text", "w1 foo", "--output", path)
    note = "note: the dictionary lacks 1 of 2 tokens of --text 'w1 foo'\n"
    assert tool(*words) == f"{note}wrote {path}\n"
    _, decoder = shown(path)["samples"]
    model = ft.from_checkpoint(translator, mt_data)
    assert " ".join(decoder["tokens"][1:]) == model.translate("w1 foo")


def test_a_dense_model_has_no_page(lm_data, tmp_path):
    fairseq("train", *dense_lm_args(lm_data, tmp_path / "save", updates=1))
    sentence = refusal_of("tokens", tmp_path / "save", lm_data, "--output", tmp_path / "page.html")
    assert "which has no experts; give that of a MoE model." in sentence


@pytest.mark.long
@pytest.mark.skipif(browser.chromium() is None, reason="not run: needs Chromium")
def test_the_tokens_page_has_no_problem_in_a_browser(mt_data, tmp_path):
    fairseq("train", *mt_args(mt_data, tmp_path / "save", "--moe-expert-count", 16, updates=2))
    path = tmp_path / "page.html"
    page(path, tmp_path / "save", mt_data)
    with browser.Browser(browser.chromium()) as chrome:
        taken = list(screenshots.taken(chrome, path, tmp_path, "tokens"))
    assert [problems for _, problems in taken] == [[]] * 4
