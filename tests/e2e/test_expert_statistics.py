"""Collects expert statistics with `fairseq-tutel tokens`, and prunes experts with these statistics."""

import json
import re
import shutil

import pytest
import torch
from cli import fairseq
from corpora import translation
from models import mt_args
from test_multilingual import BOTH
from test_stored_experts import SHARDED, generate
from tool_in_process import refusal_of, tool

import fairseq_tutel as ft

EXPERTS = 4


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """The sharded checkpoint of a translation model; its folder also has a file with expert statistics."""
    save = tmp_path_factory.mktemp("statistics")
    fairseq("train", *mt_args(mt_data, save, *SHARDED, updates=2))
    collect(save / "checkpoint_last.pt", mt_data, save / "use.json")
    return save / "checkpoint_last.pt"


def collect(path, data, output, *extra):
    """Run `tokens --output-statistics`; return the statistics of each language pair."""
    page = output.with_suffix(".html")
    printed = tool("tokens", path, data, "--output", page, "--output-statistics", output, *extra)
    assert f"wrote {page}\nwrote {output}\n" in printed
    found = json.loads(output.read_text())
    assert found["expert_statistics"] == 1
    return found["pairs"]


def test_the_expert_statistics_equal_statistics_of_the_gate_s_probabilities(mt, mt_data):
    (layers,) = json.loads((mt.parent / "use.json").read_text())["pairs"].values()
    assert list(layers) == ["encoder_0", "encoder_1", "decoder_0", "decoder_1"]
    opened = ft.from_checkpoint(mt, mt_data)
    opened.task.load_dataset("valid")
    dataset, (model,) = opened.task.dataset("valid"), opened.models
    layer, seen = model.encoder.layers[0].fc1, []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0]))
    for i in range(len(dataset)):
        tokens = dataset[i]["source"]
        model.encoder(tokens[None], torch.tensor([len(tokens)]))
    probs_TE = (torch.cat(seen) @ layer.gate.weight.T).softmax(1).double().detach()
    found = layers["encoder_0"]
    assert found["tokens"] == len(probs_TE)
    first_T, chosen_TK = probs_TE.argmax(1), probs_TE.topk(2).indices
    for e in range(EXPERTS):
        own = probs_TE[first_T == e, e]
        assert found["activity"][e] == pytest.approx(len(own) / len(probs_TE), abs=1e-6)
        assert found["confidence"][e] == pytest.approx(float(own.sum()) / max(len(own), 1), abs=1e-5)
        load = float((chosen_TK == e).sum()) * EXPERTS / chosen_TK.numel()
        assert found["load"][e] == pytest.approx(load, abs=1e-6)


def test_each_language_pair_of_a_multilingual_model_has_separate_statistics(tmp_path):
    data = translation(tmp_path)
    task = (*BOTH, "--encoder-langtok", "src", "--decoder-langtok")
    fairseq("train", *mt_args(data, tmp_path / "one", *task, "--disable-validation", updates=2))
    path, use = tmp_path / "one/checkpoint_last.pt", tmp_path / "use.json"
    pairs = collect(path, data, use, "--limit", 9)
    assert list(pairs) == ["de-en", "en-de"]
    sides = [{label: layer["tokens"] for label, layer in pairs[pair].items()} for pair in pairs]
    assert all(counts["encoder_0"] == counts["encoder_1"] > 9 for counts in sides)
    assert pairs["de-en"] != pairs["en-de"]
    prune = ("convert", "prune", path, "--by", "importance", "--statistics", use, "--share", 0.5)
    tool(*prune, "--keep-for", "de-en", "--output", tmp_path / "de.pt")
    sentence = refusal_of(*prune, "--keep-for", "de-fr", "--output", tmp_path / "fr.pt")
    assert sentence.startswith("--keep-for has 'de-fr', but ")
    assert sentence.endswith("choose from 'de-en', 'en-de'.")
    model = ft.from_checkpoint(tmp_path / "de.pt", data, source_lang="de", target_lang="en")
    assert model.models[0].encoder.layers[0].fc1.gate.weight.shape[0] == EXPERTS // 2
    assert isinstance(model.translate("w1 w2"), str)


def test_generation_with_an_automatic_expert_cache_reads_each_expert_at_most_once(mt, mt_data):
    expected, _ = generate(mt_data, mt)
    lines, run = generate(mt_data, mt, "--moe-expert-store", "on-demand", "--moe-expert-cache", "auto")
    assert lines == expected
    assert re.search(r"--moe-expert-cache auto is [\d.]+ MiB, half of the free memory", run.output)
    (found,) = run.stats("expert_store")
    assert found["fetches"] <= 4 * EXPERTS and found["peak_experts"] == found["fetches"]


def test_opening_a_model_with_offloaded_experts_reads_no_expert(mt, mt_data, tmp_path):
    """The test empties the files of all experts, so reading an expert would raise an error."""
    shutil.copytree(mt.parent, tmp_path / "empty")
    files = sorted((tmp_path / "empty/experts").rglob("*.safetensors"))
    assert files
    for file in files:
        file.write_bytes(b"")
    path = tmp_path / "empty" / mt.name
    model = ft.from_checkpoint(path, mt_data, moe_expert_store="on-demand")
    assert model.models[0].encoder.embed_tokens.weight.abs().sum() > 0
    with pytest.raises(ValueError, match=r"experts in .*, which is corrupt or missing"):
        model.translate("w1 w2")
    opened = ft.from_checkpoint(mt, mt_data, moe_expert_store="on-demand", moe_expert_cache="3")
    counters = opened.models[0].encoder.layers[0].fc1.experts.weights._store.counters
    assert counters.bytes == counters.fetches == 0
