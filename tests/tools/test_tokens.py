"""The statistics that `fairseq-tutel tokens` computes equal statistics computed by a plain loop."""

import json

import numpy as np
import pytest
import torch
from tool_in_process import refusal_of

import fairseq_tutel as ft
from fairseq_tutel.plugin.feed_forward import MoEFeedForward
from fairseq_tutel.tools.tokens.observe import ExpertCounts, Sample
from fairseq_tutel.tools.tokens.page import content
from fairseq_tutel.tools.tokens.statistics import statistics

LAYER = "encoder.layers.0.fc1"


def sample(tokens, experts, **options):
    experts = {LAYER: np.array(experts)}
    weights = {LAYER: np.full(experts[LAYER].shape, 0.5)}
    return Sample(
        **{"side": "encoder", "language": "", **options}, tokens=tokens, experts=experts, weights=weights
    )


def test_statistics_have_the_load_and_the_typical_tokens_of_each_expert():
    found = statistics(
        [
            sample(["a", "a", "b", "c"], [[0, 1], [0, 1], [2, 1], [2, 0]]),
            sample(["a", "b", "b"], [[0, 2], [2, 1], [2, -1]]),  # -1 marks a dropped assignment
        ],
        LAYER,
        4,
    )
    assert found.load_E.tolist() == pytest.approx([4 / 13, 4 / 13, 5 / 13, 0])
    names = [[token for token, _ in tokens] for tokens in found.typical]
    assert names == [["a"], ["b", "a"], ["b"], []]  # the token c occurs only once
    assert dict(found.typical[2])["b"] == pytest.approx(3 / 5)
    assert not found.languages


def test_statistics_allow_different_numbers_of_experts_per_token():
    found = statistics([sample(["a"], [[0, 1, 2]]), sample(["b", "c"], [[3], [3]])], LAYER, 4)
    assert found.load_E.tolist() == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_statistics_have_loads_per_language_and_the_classes_of_image_patches():
    both = [sample(["x"], [[0]], language="de"), sample(["y", "z"], [[1], [0]], language="en")]
    found = statistics(both, LAYER, 2)
    assert found.languages == ["de", "en"] and found.parts_LE.tolist() == [[1, 0], [0.5, 0.5]]
    pixels = np.zeros((2, 2, 1), dtype=np.uint8)
    image = sample(["cat"], [[0], [0], [0], [1]], side="image", pixels=pixels)
    other = sample(["dog"], [[1]] * 4, side="image", pixels=pixels)
    found = statistics([image, other], LAYER, 2)
    assert found.typical == [[("cat", 0.75)], [("dog", 1.0)]]


@pytest.mark.parametrize("options", ({}, {"choice": "experts"}, {"balance_bias": True}))
def test_expert_counts_per_language_pair_equal_counts_in_a_plain_loop(options):
    config = ft.MoEConfig(model_dim=4, hidden_dim=4, num_experts=5, top_k=2, **options)
    layer = MoEFeedForward(config, ft.Topology(), 1, "decoder.layers.3.fc1").eval()
    counts, expected = ExpertCounts(), {}
    for pair, length in (("de-en", 3), ("fr-en", 4), ("de-en", 6)):
        logits_TE = torch.randn(length, 5, generator=torch.Generator().manual_seed(length))
        real_T = torch.arange(length) > 0
        rules = {"choice": "experts"} if options.get("choice") else {}
        bias_E = torch.arange(5.0) if options.get("balance_bias") else None
        routing = ft.route(logits_TE, 2, real_T=real_T, bias_E=bias_E, **rules)
        counts.add(pair, layer, routing)
        sums = expected.setdefault(pair, np.zeros((3, 5)))
        for t in range(1, length):
            probs = logits_TE[t].softmax(0).tolist()
            chosen = routing.expert_ids_TK[t][routing.row_of_TK[t] >= 0].tolist()
            first = chosen[0] if "choice" not in options else int(np.argmax(probs))
            sums[:2, first] += 1, probs[first]
            for e in chosen:
                sums[2, e] += 1
    found = counts.statistics()
    assert list(found) == ["de-en", "fr-en"]
    for pair, (first_E, prob_E, load_E) in expected.items():
        ((label, use),) = found[pair].items()
        assert (label, use.tokens) == ("decoder_3", first_E.sum())
        assert use.activity == pytest.approx(first_E / first_E.sum())
        assert use.confidence == pytest.approx(prob_E / np.maximum(first_E, 1), abs=1e-6)
        assert use.load == pytest.approx(5 * load_E / load_E.sum())


def test_gate_probabilities_that_are_not_finite_raise_an_error():
    layer = MoEFeedForward(ft.MoEConfig(4, 4, 5), ft.Topology(), 1, "decoder.layers.3.fc1").eval()
    counts = ExpertCounts()
    counts.add("de-en", layer, ft.route(torch.full((3, 5), torch.nan), 2))
    with pytest.raises(ValueError, match="a gate gives probabilities that are not finite"):
        counts.statistics()


def test_the_tokens_page_has_only_layers_that_routed_tokens():
    other = "decoder.layers.0.fc1"
    made = content([sample(["a"], [[1]])], {LAYER: 2, other: 2})
    assert [layer["name"] for layer in made["layers"]] == ["encoder.layers.0"]
    assert json.loads(json.dumps(made))["samples"][0]["experts"] == {LAYER: [[1]]}


def test_output_files_of_the_tool_tokens_must_differ_and_be_writable(tmp_path):
    page = tmp_path / "a.html"
    words = ("tokens", tmp_path / "model.pt", "--output", page)
    (tmp_path / "inner").mkdir()
    both = (*words, "--output-statistics", tmp_path / "inner" / ".." / "a.html")
    assert refusal_of(*both).endswith("a.html; give two files.")
    assert refusal_of(*words, "--output-statistics", tmp_path / "no" / "a.json").startswith("--output-st")
    page.write_text("")
    assert "add --overwrite" in refusal_of(*words)
