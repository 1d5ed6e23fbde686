"""NLLB-MoE of transformers, imported and exported: the same logits over the router's options."""

import itertools
import json

import nllb
import pytest
import torch
from safetensors.torch import load_file
from tool_in_process import convert, refusal

import fairseq_tutel as ft
from fairseq_tutel.checkpoint.saved import SavedModel

LONG = pytest.mark.long
STORE = {"moe_expert_store": "on-demand", "moe_expert_tier": "disk", "moe_expert_cache": "3"}
PAIR = {"source_lang": "deu_Latn", "target_lang": "fra_Latn"}


@pytest.fixture
def no_draws(monkeypatch):
    """Transformers draws the second expert in evaluation too; here the best one always wins."""
    monkeypatch.setattr(
        torch.distributions.gumbel.Gumbel, "rsample", lambda self, shape: torch.zeros(shape)
    )
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)


def imported(model, tmp_path, *words, **keywords):
    nllb.save(model, tmp_path / "hf", **keywords)
    convert("from-hf", tmp_path / "hf", "--output", tmp_path / "ours", *words)
    return tmp_path / "ours"


def same_logits(theirs, ours, padded, atol=1e-5):
    """Compare logits where the source has tokens; return the logits."""
    src_BS, tgt_BL = nllb.batch(padded)
    expected = nllb.their_logits(theirs, src_BS, tgt_BL)
    got = nllb.our_logits(ours, src_BS, tgt_BL)
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-5)
    assert expected.std() > 0.1
    return expected


DEFAULT = [
    ({}, True),
    (
        {"router_bias": True, "normalize_router_prob_before_dropping": True, "moe_token_dropout": 0.0,
         "batch_prioritized_routing": True, "moe_eval_capacity_token_fraction": 0.25,
         "encoder_sparse_step": 4, "decoder_sparse_step": 1},
        False,
    ),
]  # fmt: skip
EACH = {
    "second_expert_policy": ("all", "sampling", "random"),
    "normalize_router_prob_before_dropping": (False, True),
    "batch_prioritized_routing": (False, True),
}
CAPACITIES = ((1.0, 64), (0.3, 64), (0.0, None), (0.0, 3))
OTHERS = [
    {"moe_token_dropout": 0.5}, {"encoder_sparse_step": 0}, {"decoder_sparse_step": 0}, {"num_experts": 7},
    {"activation_function": "gelu"}, {"scale_embedding": False}, {"router_ignore_padding_tokens": True},
    {"encoder_sparse_step": 3, "decoder_sparse_step": 4}, {"encoder_ffn_dim": 40},
]  # fmt: skip


def all_cases():
    for values, (fraction, slots) in itertools.product(itertools.product(*EACH.values()), CAPACITIES):
        options = dict(zip(EACH, values, strict=True))
        if values[:2] == ("random", True):  # refused
            continue
        options |= {"moe_eval_capacity_token_fraction": fraction, "expert_capacity": slots}
        options["router_bias"] = sum(map(hash, values[1:])) % 2 == (slots is None)
        # With a limit, transformers gives slots to padding.
        yield options, fraction == 1
    for options in OTHERS:
        yield options, True


@pytest.mark.parametrize(
    ("options", "padded"), [*DEFAULT, *(pytest.param(*case, marks=LONG) for case in all_cases())], ids=str
)
def test_imported_logits_are_those_of_transformers(options, padded, tmp_path, no_draws):
    theirs = nllb.moe_model(**options)
    folder = imported(theirs, tmp_path)
    for store in ({}, STORE):
        same_logits(theirs, ft.from_checkpoint(folder, **store).models[0], padded)


def test_a_router_drops_and_options_matter(tmp_path, no_draws):
    """The comparison above would not fail if options had no effect."""
    src_BS, tgt_BL = nllb.batch(padded=False)
    plain = nllb.their_logits(nllb.moe_model(), src_BS, tgt_BL)
    for options in (
        {"moe_eval_capacity_token_fraction": 0.25}, {"moe_token_dropout": 0.0},
        {"moe_eval_capacity_token_fraction": 0.0, "expert_capacity": 3},
    ):  # fmt: skip
        other = nllb.moe_model(**options)
        assert not torch.allclose(nllb.their_logits(other, src_BS, tgt_BL), plain, atol=1e-3), options


@pytest.mark.parametrize(
    ("words", "atol"),
    [
        (("--expert-dtype", "int8"), 1.0),
        pytest.param(("--expert-dtype", "fp32"), 1e-5, marks=LONG),
        pytest.param(("--expert-dtype", "bf16"), 0.5, marks=LONG),
        pytest.param(("--expert-dtype", "int4"), 6.0, marks=LONG),
    ],
)
def test_imported_experts_in_a_store_are_those_in_memory(words, atol, tmp_path):
    theirs = nllb.moe_model()
    folder = imported(theirs, tmp_path, *words)
    stored = ft.from_checkpoint(folder, **STORE, moe_expert_compute="unpacked").models[0]
    resident = ft.from_checkpoint(folder).models[0]
    src_BS, tgt_BL = nllb.batch()
    expected = nllb.our_logits(resident, src_BS, tgt_BL)
    assert torch.equal(nllb.our_logits(stored, src_BS, tgt_BL), expected)
    same_logits(theirs, resident, True, atol)


@LONG
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_released_half_precision_model_keeps_its_weights(dtype, tmp_path):
    theirs = nllb.moe_model(router_dtype=dtype).to(getattr(torch, dtype))
    folder = imported(theirs, tmp_path)
    for store in ({}, STORE):
        ours = ft.from_checkpoint(folder, **store).models[0]
        same_logits(theirs.float(), ours, True, 0.3)  # their router still computes in half precision
    state = SavedModel.open(folder / "model.pt").weights
    assert {t.dtype for n, t in state.items() if "version" not in n} == {getattr(torch, dtype)}


def greedy(theirs, text):
    """Return the tokens of transformers' greedy output after the language."""
    source = torch.tensor([nllb.encoded(text, "deu_Latn")])
    (tokens,) = theirs.generate(
        source, forced_bos_token_id=nllb.language_id("fra_Latn"), num_beams=1, do_sample=False,
        max_new_tokens=12,
    )  # fmt: skip
    return [int(i) for i in tokens[2:] if i not in (1, 2)]


def test_greedy_translations_are_equal(tmp_path):
    theirs = nllb.moe_model(seed=5)
    model = ft.from_checkpoint(imported(theirs, tmp_path))
    for text in nllb.TEXTS:
        expected = nllb.pieces().decode(
            [i - 1 for i in greedy(theirs, text) if i < nllb.language_id("deu_Latn")]
        )
        got = model.translate(text, beam=1, max_len_a=0, max_len_b=12, **PAIR)
        length = min(len(got), len(expected)) - 4
        assert length > 8 and got[:length] == expected[:length]


def exported(path, folder, *words):
    convert("to-hf", path, "--output", folder, *words)
    from transformers import NllbMoeForConditionalGeneration

    return NllbMoeForConditionalGeneration.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    "options",
    [
        {"router_bias": True, "normalize_router_prob_before_dropping": True},
        pytest.param({}, marks=LONG),
        pytest.param(
            {"moe_eval_capacity_token_fraction": 0.3, "batch_prioritized_routing": True}, marks=LONG
        ),
        pytest.param({"moe_eval_capacity_token_fraction": 0.0, "expert_capacity": 3}, marks=LONG),
        pytest.param({"second_expert_policy": "sampling", "router_dtype": "bfloat16"}, marks=LONG),
        pytest.param({"encoder_sparse_step": 1, "decoder_sparse_step": 0, "num_experts": 3}, marks=LONG),
    ],
    ids=str,
)
def test_there_and_back_gives_the_same_tensors_and_options(options, tmp_path):
    theirs = nllb.moe_model(**options)
    folder = imported(theirs, tmp_path)
    again = exported(folder / "model.pt", tmp_path / "back")
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    left_out = {"expert_capacity", "_name_or_path", "transformers_version", "dtype"}
    old, new = ({k: v for k, v in m.config.to_dict().items() if k not in left_out} for m in (theirs, again))
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        assert new.pop(key) in (0.0, old.pop(key))
    assert new == old


@LONG
def test_a_full_quantized_or_split_checkpoint_is_exported(tmp_path):
    theirs = nllb.moe_model()
    folder = imported(theirs, tmp_path)
    convert("full", folder / "model.pt", "--output", tmp_path / "full.pt")
    exported(tmp_path / "full.pt", tmp_path / "a", "--max-shard-size", "20KB")
    assert len([*(tmp_path / "a").glob("model-*.safetensors")]) > 3
    convert(
        "sharded",
        "--input",
        tmp_path / "full.pt",
        "--output",
        folder / "int8.pt",
        "--expert-dtype",
        "int8",
    )
    rounded = exported(folder / "int8.pt", tmp_path / "b")
    src_BS, tgt_BL = nllb.batch()
    ours = ft.from_checkpoint(folder / "int8.pt").models[0]
    same_logits(rounded, ours, True)
    expected = nllb.their_logits(theirs, src_BS, tgt_BL)
    split = type(rounded).from_pretrained(tmp_path / "a").eval()
    assert torch.equal(nllb.their_logits(split, src_BS, tgt_BL), expected)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An imported model."""
    return imported(nllb.moe_model(), tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("moe_top_k", 1, "moe_top_k 1, but NllbMoeForConditionalGeneration has only 2"),
        ("moe_gate_type", "cosine", "moe_gate_type cosine, which transformers does not have"),
        ("moe_normalize_gate", "none", "moe_normalize_gate none, which transformers does not have"),
        ("moe_routed_scaling_factor", 1.5, "multiplies experts' outputs by 1.5 "),
        ("moe_eval_capacity_factor", 1.0, "transformers limits the capacity only to a fraction"),
        ("moe_prescore", True, "moe_prescore True"),
        ("moe_fom", 0.1, "moe_fom 0.1, but NllbMoeForConditionalGeneration has only 0.0"),
        ("moe_eval_capacity_max_seqlen", True, "moe_eval_capacity_max_seqlen True"),
        ("moe_expert_groups", 2, "moe_expert_groups 2"),
        ("moe_pregate", 1, "moe_pregate 1"),
    ],
)
def test_an_option_without_counterpart_is_refused_by_name(key, value, words, small, tmp_path):
    saved = SavedModel.open(small / "model.pt", keep_shards=True)
    saved.options.update({"moe_eom": 0.0, key: value})  # a layer refuses masking with moe_prescore
    if key == "moe_gate_type":
        for layer in saved.layers:
            if layer.has_experts:
                saved.weights[f"{layer.moe}.gate.directions"] = saved.weights[f"{layer.moe}.gate.weight"]
    saved.write(tmp_path / "a.pt")
    assert words in refusal("to-hf", tmp_path / "a.pt", "--output", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_masking_and_scaling_become_one_option(small, tmp_path):
    saved = SavedModel.open(small / "model.pt", keep_shards=True)
    assert saved.options["moe_eom"] == 0.2
    saved.options.update({"moe_eom": 0.5, "moe_routed_scaling_factor": 0.5})
    saved.write(tmp_path / "a.pt")
    convert("to-hf", tmp_path / "a.pt", "--output", tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["moe_token_dropout"] == 0.75


def edited(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"second_expert_policy": "best"}, "second_expert_policy 'best'"),
        ({"moe_token_dropout": 1.0}, "moe_token_dropout 1.0"),
        ({"num_experts": 1}, "num_experts 1"),
        ({"num_experts": 5}, "lacks 16 tensors of experts"),
        ({"encoder_sparse_step": 0, "decoder_sparse_step": 0}, "no layer has experts"),
        ({"expert_capacity": "many"}, "expert_capacity 'many'"),
        ({"router_dtype": "float8"}, "router_dtype 'float8'"),
        (
            {"second_expert_policy": "random", "normalize_router_prob_before_dropping": True},
            "normalizes only the first expert's weight",
        ),
        ({"decoder_ffn_dim": 25}, "requires (25, 16)"),
    ],
    ids=str,
)
def test_inconsistent_options_are_one_sentence(changes, words, tmp_path):
    folder = edited(nllb.save(nllb.moe_model(), tmp_path / "hf"), **changes)
    assert words in refusal("from-hf", folder, "--output", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


KEPT = {"encoder_1": [3, 0], "decoder_1": [1, 2, 3], "decoder.layers.3": [0, 2]}
GLOBAL = [0, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14]  # the same, with the layers encoder 1 and 3, decoder 1 and 3


def test_kept_experts_are_a_pruned_model(tmp_path):
    theirs = nllb.moe_model()
    file = tmp_path / "keep.json"
    file.write_text(json.dumps(KEPT))
    folder = imported(theirs, tmp_path, "--keep-experts", file)
    saved = SavedModel.open(folder / "model.pt")
    assert saved.options["moe_expert_count"] == "2,4,3,2"
    kept = ([0, 3], [0, 1, 2, 3], [1, 2, 3], [0, 2])
    layers = [*theirs.model.encoder.layers, *theirs.model.decoder.layers]
    with torch.no_grad():
        for layer, ids in zip((layer for layer in layers if layer.is_sparse), kept, strict=True):
            router = layer.ffn.router
            router.classifier.weight = torch.nn.Parameter(router.classifier.weight[ids])
            router.num_experts = len(ids)
            experts = [layer.ffn.experts[f"expert_{i}"] for i in ids]
            layer.ffn.experts = torch.nn.ModuleDict({f"expert_{i}": e for i, e in enumerate(experts)})
    same_logits(theirs, ft.from_checkpoint(folder).models[0], True)

    others = {
        "list": (GLOBAL, ()),
        "languages": (
            {"deu_Latn": [0, 3, 4, 5, 6, 7, 8], "fra_Latn": [1, 9, 10, 11, 12, 14]},
            ("--keep-for", "deu_Latn-fra_Latn"),
        ),
        "pair": ({"deu_Latn-fra_Latn": GLOBAL}, ("--keep-for", "deu_Latn-fra_Latn")),
    }
    for name, (content, words) in others.items():
        file.write_text(json.dumps(content))
        made = tmp_path / name
        convert("from-hf", tmp_path / "hf", "--output", made, "--keep-experts", file, *words)
        again = SavedModel.open(made / "model.pt").weights
        assert again.keys() == saved.weights.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in saved.weights.items())
    text = refusal("to-hf", folder / "model.pt", "--output", tmp_path / "back")
    assert "--moe-expert-count 2,4,3,2" in text


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        ('{"encoder_2": [0, 1]}', (), "the MoE layers are encoder_1, encoder_3, decoder_1, decoder_3"),
        ('{"encoder_1": [0]}', (), "keeps 1 experts in encoder.layers.1"),
        ('{"encoder_1": [0, 4]}', (), "has the expert ID 4, but the IDs are 0 to 3"),
        (f"[{'9' * 400}]", (), f"has the expert ID {'9' * 60}…, but the IDs"),
        ('{"encoder_1": "all"}', (), "in place of expert IDs"),
        ("[0, 1]", (), "keeps 0 experts in encoder.layers.3"),
        ("[0, 1]", ("--keep-for", "deu_Latn-fra_Latn"), "has no languages"),
        ('{"deu_Latn": [0, 1]}', ("--keep-for", "deu_Latn-fra_Latn"), "no list for fra_Latn"),
        ('{"encoder_1": [0, 1]}', ("--keep-for", ""), "--keep-for has '', but"),
        ("{", (), "cannot be read"),
    ],
)
def test_a_wrong_list_of_experts_is_one_sentence(content, words, expected, tmp_path):
    folder = nllb.save(nllb.moe_model(), tmp_path / "hf")
    (tmp_path / "keep.json").write_text(content)
    command = ("from-hf", folder, "--output", tmp_path / "ours")
    assert "add --keep-experts FILE" in refusal(*command, "--keep-for", "deu_Latn-fra_Latn")
    assert expected in refusal(*command, "--keep-experts", tmp_path / "keep.json", *words)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(10**12, "has num_experts 1000000000000 and"), (5, "lacks 16 tensors of experts")],
)
def test_more_experts_than_tensors_are_refused(count, expected, tmp_path):
    folder = nllb.save(nllb.moe_model(), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": count}))
    assert expected in refusal("from-hf", folder, "--output", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_converted_entries_are_not_printed_as_unknown(tmp_path):
    folder = nllb.save(nllb.moe_model(), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"new_switch": True}))
    printed = convert("from-hf", folder, "--output", tmp_path / "ours")
    note = next(line for line in printed.splitlines() if "not converted" in line)
    assert "'new_switch'" in note and "expert" not in note and "moe_" not in note
    assert {"num_experts", "expert_capacity", "moe_token_dropout"} <= config.keys()


def test_names_without_prefix_and_pickled_files_are_read(tmp_path):
    """The released NLLB-MoE has names without "model.", and .bin files."""
    theirs = nllb.moe_model()
    nllb.save(theirs, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for part in range(3):
        file = f"pytorch_model-{part + 1:05d}-of-00003.bin"
        own = {name.removeprefix("model."): tensors[name] for name in names[part::3]}
        torch.save(own, tmp_path / "hf" / file)
        where |= dict.fromkeys(own, file)
    (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    convert("from-hf", tmp_path / "hf", "--output", tmp_path / "ours")
    same_logits(theirs, ft.from_checkpoint(tmp_path / "ours").models[0], True)
