"""The tests check tensors, options, outputs and errors of `convert prune` and `convert dense`."""

import itertools
import re

import pytest
import torch
from moe_files import D, E, H, load, outputs, save
from tool_in_process import tool

from fairseq_tutel.checkpoint.saved import Layer
from fairseq_tutel.convert.experts import kept_by_share
from fairseq_tutel.inference.expert_statistics import LayerStatistics, text_of

STEP = "decoder.layers.{}.fc1."


@pytest.fixture
def convert(tmp_path):
    """Return a function that runs `convert KIND` from a.pt to b.pt, and returns the printed text."""

    def run(kind, *words, input="a.pt"):
        files = ("--output", tmp_path / "b.pt", "--overwrite")
        return tool("convert", kind, tmp_path / input, *files, *words)

    return run


def tokens(count=200):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(4))


def same_outputs(tmp_path):
    x = tokens()
    a, b = outputs(tmp_path / "a.pt", x), outputs(tmp_path / "b.pt", x)
    assert a.keys() == b.keys()
    return all(torch.allclose(a[label], b[label], rtol=1e-5, atol=1e-5) for label in a)


PER_EXPERT = {
    "plain": ({}, ["gate.weight"]),
    "cosine": ({"gate_type": "cosine"}, ["gate.directions"]),
    "biased": ({"gate_type": "biased"}, ["gate.weight", "gate.bias"]),
    "two gates": (
        {"gate_type": "linear,cosine,linear", "gate_index": 2},
        ["gate.weight", "other_gates.0.directions", "other_gates.1.weight"],
    ),
    "bias": ({"balance_bias": True}, ["gate.weight", "balance_bias.bias"]),
    "glu": ({"expert_type": "glu"}, ["gate.weight", "experts.fc3_weight", "experts.fc3_bias"]),
    "shared and residual": ({"shared_experts": 1, "residual": True}, ["gate.weight"]),
    "shared and CMR, masked": ({"shared_experts": 1, "cmr": True, "eom": 0.2}, ["gate.weight"]),
    "layer norm": ({"hidden_layer_norm": True}, ["gate.weight"]),
}
FFN = [f"experts.fc{i}_{kind}" for i in (1, 2) for kind in ("weight", "bias")]


@pytest.mark.parametrize("name", PER_EXPERT)
def test_convert_prune_keeps_the_remaining_experts_in_every_tensor(name, convert, tmp_path):
    options, per_expert = PER_EXPERT[name]
    save(tmp_path / "a.pt", **options)
    text = convert("prune", "--drop", "decoder_1=0,2")
    a, b = load(tmp_path / "a.pt")["model"], load(tmp_path / "b.pt")["model"]
    assert list(a) == list(b)
    changed = [f"{STEP.format(1)}{key}" for key in (*per_expert, *FFN)]
    for key in a:
        expected = a[key][[1, 3]] if key in changed else a[key]
        assert torch.equal(b[key], expected), key
    assert load(tmp_path / "b.pt")["cfg"]["model"]["moe_expert_count"] == "4,2"
    assert "decoder_0: 4 -> 4 experts, 0/1/2/3\ndecoder_1: 4 -> 2 experts, 1/3\n" in text
    outputs(tmp_path / "b.pt", tokens())  # The pruned weights fit the pruned layers.


def no_token_chooses_the_last(model):
    """Copy expert 1's gate row to all later experts; equal scores favor the lowest expert IDs."""
    for i in range(2):
        rows = model[f"{STEP.format(i)}gate.weight"]
        rows[2:] = rows[1]


def test_convert_prune_of_an_unused_expert_changes_no_output(convert, tmp_path):
    save(tmp_path / "a.pt", change=no_token_chooses_the_last)
    convert("prune", "--drop", 3)
    assert same_outputs(tmp_path)
    convert("prune", "--drop", 0)
    assert not same_outputs(tmp_path)


def equal_experts(model):
    for key in model:
        if ".experts.fc" in key:
            model[key] = model[key][:1].repeat(E, *(1 for _ in model[key].shape[1:]))


def test_convert_prune_must_leave_expert_groups_of_equal_size(convert, tmp_path):
    save(tmp_path / "a.pt", num_experts=6, expert_groups=2, groups_per_token=2)
    convert("prune", "--drop", "1,5")
    outputs(tmp_path / "b.pt", tokens())
    for dropped in ("0,1", "0,1,2", "0,1,2,3"):
        with pytest.raises(SystemExit, match=r"2 groups of 3 neighboring experts|decoder_0: "):
            convert("prune", "--drop", dropped)


DENSE = {
    "equal experts, one": ({"change": equal_experts}, "3", True),
    "equal experts, three": ({"change": equal_experts}, "0,2,3", True),
    "equal experts, all": ({"change": equal_experts}, "all", True),
    "equal experts, scaled": (
        {"change": equal_experts, "routed_scaling_factor": 2.5, "shared_experts": 2}, "1", True),
    "equal experts, masked": (
        {"change": equal_experts, "eom": 0.2, "fom": 0.3, "shared_experts": 2}, "1", True),
    "equal experts, layer norm": ({"change": equal_experts, "hidden_layer_norm": True}, "0", True),
    "one expert": ({"num_experts": 1, "top_k": 1}, "0", True),
    "drawn apart": ({}, "0", False),
    "drawn apart, all": ({"top_k": E}, "all", False),
    "equal experts, top-1": ({"change": equal_experts, "top_k": 1}, "0", False),
    "equal experts, prescored": ({"change": equal_experts, "prescore": True}, "0", False),
    "equal experts, capacity": ({"change": equal_experts, "eval_capacity_factor": 0.5}, "0", False),
    "equal experts, who choose": ({"change": equal_experts, "choice": "experts"}, "0", False),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_convert_dense_prints_whether_outputs_stay_equal(name, convert, tmp_path):
    options, chosen, is_same = DENSE[name]
    save(tmp_path / "a.pt", **options)
    text = convert("dense", "--experts", chosen)
    assert same_outputs(tmp_path) == is_same
    assert ("its outputs equal the MoE model's outputs up to rounding" in text) == is_same
    assert ("if the gate has an effect in decoder_0, decoder_1" in text) != is_same


def test_convert_dense_keeps_one_experts_weights_and_uses_fairseqs_tensor_names(convert, tmp_path):
    save(tmp_path / "a.pt")
    convert("dense", "--experts", "decoder_0=2", "decoder_1=0")
    a, b = load(tmp_path / "a.pt"), load(tmp_path / "b.pt")
    for i, expert in ((0, 2), (1, 0)):
        for key in FFN:
            dense = f"decoder.layers.{i}.{key.removeprefix('experts.').replace('_', '.')}"
            assert torch.equal(b["model"][dense], a["model"][STEP.format(i) + key][expert])
    assert not [key for key in b["model"] if "expert" in key or "gate" in key]
    assert b["cfg"] == {
        "model": {"_name": "transformer_lm", "decoder_ffn_embed_dim": H, "scale_fc": False},
        "task": {"_name": "language_modeling"},
        "criterion": {"_name": "cross_entropy", "sentence_avg": False},
        "optimizer": {"_name": "adam"},
    }


def test_convert_dense_pads_the_ffns_of_all_layers_to_one_hidden_dimension(convert, tmp_path):
    layers = ("decoder.layers.0!", "decoder.layers.1", "decoder.layers.2")
    save(tmp_path / "a.pt", layers, equal_experts)
    text = convert("dense", "--experts", "decoder_1=0,1,2", "decoder_2=0")
    assert "decoder_0: padded with zeros to 18 hidden units" in text
    assert "decoder_2: padded with zeros to 18 hidden units" in text
    made = load(tmp_path / "b.pt")
    assert made["cfg"]["model"]["decoder_ffn_embed_dim"] == 3 * H
    assert {t.shape for key, t in made["model"].items() if key.endswith("fc1.weight")} == {(18, D)}
    assert same_outputs(tmp_path)


# Lists: activity, confidence, load. In decoder_0, expert 3 has a larger load than expert 1, but a smaller
# importance, which is activity * exp(confidence).
USE = {
    "decoder_0": LayerStatistics(10, [0.4, 0.29, 0.01, 0.3], [0.5, 0.9, 0.9, 0.1], [1.2, 0.6, 0.7, 1.5]),
    "decoder_1": LayerStatistics(10, [0.97, 0.01, 0.01, 0.01], [0.9, 0.5, 0.4, 0.3], [2.5, 0.5, 0.6, 0.4]),
}
OTHER = {label: LayerStatistics(10, [0, 0, 0.5, 0.5], [0, 0, 1, 1], [0.1, 0.1, 1.9, 1.9]) for label in USE}
SHARES = {
    "load": (("--share", 0.5), "0/3", "0/2"),
    "importance": (("--share", 0.5, "--by", "importance"), "0/1", "0/1"),
    "globally": (("--share", 0.75, "--by", "importance", "--globally"), "0/1/3", "0/1/2"),
    "globally, few": (("--share", 0.2, "--by", "importance", "--globally"), "0/1", "0/1"),
    "one language pair": (("--share", 0.5, "--by", "importance", "--keep-for", "fr-en"), "2/3", "2/3"),
    "at least top-k": (("--share", 0.01), "0/3", "0/2"),
    "another top-k": (("--share", 0.01, "--moe-top-k", 1), "3", "0"),
}


@pytest.mark.parametrize("name", SHARES)
def test_convert_prune_keeps_the_experts_with_the_largest_load_or_importance(name, convert, tmp_path):
    save(tmp_path / "a.pt")
    pairs = {"de-en": USE, "fr-en": OTHER} if "pair" in name else {"de-en": USE}
    (tmp_path / "use.json").write_text(text_of(pairs))
    words, *expected = SHARES[name]
    text = convert("prune", *words, "--statistics", tmp_path / "use.json")
    assert re.findall(r"experts, (\S+)", text) == expected
    outputs(tmp_path / "b.pt", tokens())


def test_convert_prune_reads_only_the_experts_that_it_keeps(convert, tmp_path):
    """The tensor of the removed expert is damaged, but `convert prune` does not read this tensor."""
    save(tmp_path / "a.pt")
    tool("convert", "sharded", tmp_path / "a.pt", "--output", tmp_path / "sharded.pt")
    (file, *_) = sorted((tmp_path / "experts").rglob("decoder.layers.0.*"))
    tensor = load(tmp_path / "a.pt")["model"][STEP.format(0) + "experts.fc1_weight"][2].numpy().tobytes()
    content = file.read_bytes()
    assert content.count(tensor) == 1
    file.write_bytes(content.replace(tensor, bytes(len(tensor))))
    convert("prune", "--drop", "decoder_0=2", input="sharded.pt")
    whole, pruned = load(tmp_path / "a.pt")["model"], load(tmp_path / "b.pt")["model"]
    key = STEP.format(0) + "experts.fc1_weight"
    assert torch.equal(pruned[key], whole[key][[0, 1, 3]])
    with pytest.raises(SystemExit, match="which is corrupt or missing"):
        convert("prune", "--drop", "decoder_0=1", input="sharded.pt")


FLAT, STEEP, ODD = (Layer(0, i, "encoder", f"encoder.layers.{i}", has_experts=True) for i in range(3))
SCORES = {
    FLAT: [1.0, 1.1, 0.9, 1.05, 0.95, 1.0],
    STEEP: [0.02, 5.0, 0.3, 0.01, 0.6, 0.07],
    ODD: [2.0, 0.0, 1.0],
}


@pytest.mark.parametrize("least", (1, 2))
def test_with_global_pruning_each_layer_keeps_the_same_fraction_of_its_expert_scores(least):
    """The reference raises the kept fraction in small steps until enough experts are kept."""
    for wanted in range(5, 16):
        found = kept_by_share(SCORES, wanted / 15, dict.fromkeys(SCORES, least), globally=True)
        count = max(wanted, 3 * least)
        for step in range(1001):
            reference = {}
            for layer, scores in SCORES.items():
                order = sorted(range(len(scores)), key=lambda i: -scores[i])
                sums = itertools.accumulate(scores[i] / sum(scores) for i in order)
                kept = [i for i, t in zip(order, sums, strict=True) if t <= step / 1000 + 1e-12]
                reference[layer] = {*order[:least], *kept}
            if sum(map(len, reference.values())) >= count:
                break
        assert sum(map(len, found.values())) == count
        # The last step of the reference may add several experts, of which only some are kept.
        assert all(set(found[layer]) <= reference[layer] for layer in SCORES)


REFUSED = {
    "truncated": ({"input": "cut.pt"}, ("prune", "--drop", 0), "is corrupt or not a checkpoint"),
    "dense": ({"input": "dense.pt"}, ("prune", "--drop", 1), "has no experts; give a MoE"),
    "a crash file": (
        {"change": lambda m: m.update({k: t[:2] for k, t in m.items() if ".experts." in k})},
        ("prune", "--drop", 0), "has 2 experts in decoder_0, but decoder.layers.0.fc1.gate.weight",
    ),
    "half a layer": (
        {"change": lambda m: m.pop("decoder.layers.1.final_layer_norm.weight")},
        ("prune", "--drop", 0), "lacks decoder.layers.1.final_layer_norm.weight; give a complete",
    ),
    "no such expert": ({}, ("prune", "--drop", "1,4"), "--drop names expert 4, but decoder_0 has 4"),
    "no word": ({}, ("prune", "--drop", ""), "--drop has an empty word, but '' is not an expert ID"),
    "below zero": ({}, ("dense", "--experts", "-1"), "--experts has -1, but '-1' is not an expert ID"),
    "no such layer": ({}, ("prune", "--drop", "decoder_2=1"), "layers from decoder_0, decoder_1"),
    "two for all": ({}, ("prune", "--drop", "1", "2"), "give one value for all layers, or LAYER="),
    "too few left": ({}, ("prune", "--drop", "0,1,2"), "decoder_0: top_k (--moe-top-k) is 2, but"),
    "none left": ({}, ("prune", "--drop", "decoder_1=0,1,2,3"), "decoder_1: num_experts"),
    "top-k": ({}, ("prune", "--drop", "0", "--moe-top-k", 0), "decoder_0: top_k (--moe-top-k) is 0"),
    "no loads but zero": ({}, ("prune", "--share", 0.5, "--load", "0,0,0,0"), "only loads of 0"),
    "no number of a load": ({}, ("prune", "--share", 0.5, "--load", "nan,1,1,1"), "load has nan"),
    "importance of loads": ({}, ("prune", "--share", 0.5, "--by", "importance", "--load", "1,1,1,1"),
                            "--by is importance, but only a file of `tokens --output-statistics` has it"),
    "pairs of loads": ({}, ("prune", "--share", 0.5, "--keep-for", "de-en", "--load", "1,1,1,1"),
                       "--keep-for is de-en, but no statistics of language pairs are given; add"),
    "share": ({}, ("prune", "--share", 1.5, "--load", "1,1,1,1"), "--share is 1.5; give a number above 0"),
    "no share of loads": ({}, ("prune", "--share", 0.5), "--share is 0.5; give"),
    "no statistics": ({}, ("prune", "--share", 0.5, "--statistics", "none.json"), "names none.json, which"),
    "too few loads": ({}, ("prune", "--share", 0.1, "--load", "1,2"), "has 2 loads for decoder_0"),
    "no log": ({}, ("prune", "--share", 0.1, "--log", "none.log"), "does not exist; give a log"),
    "twice": ({}, ("prune", "--drop", "3,2,3"), "expert 3 is named twice; name it once"),
    "a gate of one's own": ({"gate_type": "custom_parts.CalmGate"}, ("prune", "--drop", 0),
                            "has the custom gate custom_parts.CalmGate"),
    "not every layer": ({}, ("dense", "--experts", "decoder_1=0"), "names no expert of decoder_0"),
    "glu": ({"expert_type": "glu"}, ("dense", "--experts", 0), "has experts of the type glu"),
    "residual": ({"residual": True}, ("dense", "--experts", 0), "which a dense layer cannot"),
    "CMR": ({"cmr": True}, ("dense", "--experts", 0), "accepts only models without --moe-cmr"),
    "layer norm, two": ({"hidden_layer_norm": True}, ("dense", "--experts", "0,1"),
                        "normalizes the hidden layer of each expert (--scale-fc)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_convert_rejects_bad_input_with_a_one_sentence_error_and_writes_nothing(case, convert, tmp_path):
    options, (kind, *words), sentence = REFUSED[case]
    file, options = options.get("input", "a.pt"), {k: v for k, v in options.items() if k != "input"}
    whole = save(tmp_path / "a.pt", **options)
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:2000])
    save(tmp_path / "dense.pt", ("decoder.layers.0!",))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    words = [tmp_path / word if re.search(r"\.(pt|log)$", str(word)) else word for word in map(str, words)]
    with pytest.raises(SystemExit) as end:
        convert(kind, *words, input=file)
    message = end.value.code
    assert message.startswith("error: ") and "\n" not in message
    assert sentence in message
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
