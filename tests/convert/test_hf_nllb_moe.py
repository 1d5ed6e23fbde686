"""NLLB-MoE is imported and exported with equal logits for all values of the router's options."""

import itertools
import json
import os
import weakref

import nllb
import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_in_process import convert, refusal

import fairseq_tutel as ft
from fairseq_tutel.checkpoint import atomic_save
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.released import from_hf, to_hf
from fairseq_tutel.convert.released.folder import ReleasedFolder
from fairseq_tutel.convert.released.keep import kept_experts

LONG = pytest.mark.long
STORE = {"moe_expert_store": "on-demand", "moe_expert_tier": "disk", "moe_expert_cache": "3"}
PAIR = {"source_lang": "deu_Latn", "target_lang": "fra_Latn"}


@pytest.fixture
def no_draws(monkeypatch):
    """Remove the random choice of the second expert that transformers makes in evaluation."""
    monkeypatch.setattr(
        torch.distributions.gumbel.Gumbel, "rsample", lambda self, shape: torch.zeros(shape)
    )
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)


def converted(source, output, **how):
    """Convert a model folder, and return the printed notes."""
    return from_hf.convert(ReleasedFolder(source), output, from_hf.Experts(**how))[1]


def imported(model, tmp_path, **how):
    nllb.save(model, tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "ours", **how)
    return tmp_path / "ours"


def same_logits(theirs, ours, padded, atol=1e-5):
    """Assert that logits are equal at all positions without padding, and return the logits."""
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
        if values[:2] == ("random", True):  # `convert from-hf` rejects these options.
            continue
        options |= {"moe_eval_capacity_token_fraction": fraction, "expert_capacity": slots}
        options["router_bias"] = sum(map(hash, values[1:])) % 2 == (slots is None)
        # With a capacity limit, the library transformers assigns slots to padding.
        yield options, fraction == 1
    for options in OTHERS:
        yield options, True


@pytest.mark.parametrize(
    ("options", "padded"), [*DEFAULT, *(pytest.param(*case, marks=LONG) for case in all_cases())], ids=str
)
def test_the_logits_of_an_imported_model_equal_those_of_transformers(options, padded, tmp_path, no_draws):
    theirs = nllb.moe_model(**options)
    folder = imported(theirs, tmp_path)
    for store in ({}, STORE):
        same_logits(theirs, ft.from_checkpoint(folder, **store).models[0], padded)


def test_the_compared_models_drop_assignments_and_depend_on_router_options(tmp_path, no_draws):
    """If router options had no effect, the comparison of logits would prove nothing."""
    src_BS, tgt_BL = nllb.batch(padded=False)
    plain = nllb.their_logits(nllb.moe_model(), src_BS, tgt_BL)
    for options in (
        {"moe_eval_capacity_token_fraction": 0.25}, {"moe_token_dropout": 0.0},
        {"moe_eval_capacity_token_fraction": 0.0, "expert_capacity": 3},
    ):  # fmt: skip
        other = nllb.moe_model(**options)
        assert not torch.allclose(nllb.their_logits(other, src_BS, tgt_BL), plain, atol=1e-3), options


@pytest.mark.parametrize(
    ("dtype", "atol"), [("int8", 1.0), *(pytest.param(*case, marks=LONG) for case in
    (("fp32", 1e-5), ("bf16", 0.5), ("int4", 6.0)))]
)  # fmt: skip
def test_imported_experts_in_an_expert_store_give_equal_logits(dtype, atol, tmp_path):
    theirs = nllb.moe_model()
    folder = imported(theirs, tmp_path, expert_dtype=dtype)
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
        same_logits(theirs.float(), ours, True, 0.3)  # Transformers routes in half precision.
    state = SavedModel.open(folder / "model.pt").weights
    assert {t.dtype for n, t in state.items() if "version" not in n} == {getattr(torch, dtype)}


def greedy(theirs, text):
    """Return the greedy output tokens of transformers after the language token."""
    source = torch.tensor([nllb.encoded(text, "deu_Latn")])
    (tokens,) = theirs.generate(
        source, forced_bos_token_id=nllb.language_id("fra_Latn"), num_beams=1, do_sample=False,
        max_new_tokens=12,
    )  # fmt: skip
    return [int(i) for i in tokens[2:] if i not in (1, 2)]


def test_greedy_translations_of_an_imported_model_equal_those_of_transformers(tmp_path):
    theirs = nllb.moe_model(seed=5)
    model = ft.from_checkpoint(imported(theirs, tmp_path))
    for text in nllb.TEXTS:
        expected = nllb.pieces().decode(
            [i - 1 for i in greedy(theirs, text) if i < nllb.language_id("deu_Latn")]
        )
        got = model.translate(text, beam=1, max_len_a=0, max_len_b=12, **PAIR)
        length = min(len(got), len(expected)) - 4
        assert length > 8 and got[:length] == expected[:length]


def exported(path, folder, limit=10**9):
    to_hf.convert(SavedModel.open(path, keep_shards=True), folder, limit)
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
def test_import_and_export_restore_all_tensors_and_options(options, tmp_path):
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
def test_a_full_or_quantized_or_sharded_checkpoint_can_be_exported(tmp_path):
    theirs = nllb.moe_model()
    folder = imported(theirs, tmp_path)
    convert("full", folder / "model.pt", "--output", tmp_path / "full.pt")
    exported(tmp_path / "full.pt", tmp_path / "a", 20_000)
    assert len([*(tmp_path / "a").glob("model-*.safetensors")]) > 3
    convert("sharded", tmp_path / "full.pt", "--output", folder / "int8.pt", "--expert-dtype", "int8")
    rounded = exported(folder / "int8.pt", tmp_path / "b")
    src_BS, tgt_BL = nllb.batch()
    ours = ft.from_checkpoint(folder / "int8.pt").models[0]
    same_logits(rounded, ours, True)
    expected = nllb.their_logits(theirs, src_BS, tgt_BL)
    split = type(rounded).from_pretrained(tmp_path / "a").eval()
    assert torch.equal(nllb.their_logits(split, src_BS, tgt_BL), expected)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Return a released folder with several weight files, written without transformers."""
    return nllb.plain_folder(tmp_path_factory.mktemp("released") / "hf")


@pytest.fixture(scope="module")
def small(released):
    """Return the folder of an imported model."""
    converted(released, released.with_name("ours"))
    return released.with_name("ours")


def test_an_option_that_transformers_lacks_raises_an_error_with_its_name(small, tmp_path):
    for key, value, sentence in (
        ("moe_top_k", 1, "moe_top_k 1, but NllbMoeForConditionalGeneration has only 2"),
        ("moe_normalize_gate", "none", "moe_normalize_gate none, which transformers does not have"),
        ("moe_routed_scaling_factor", 1.5, "multiplies experts' outputs by 1.5 "),
        ("moe_eval_capacity_factor", 1.0, "transformers limits the capacity only to a fraction"),
        ("moe_prescore", True, "moe_prescore True"),
        ("moe_expert_groups", 2, "moe_expert_groups 2"),
        ("moe_pregate", 1, "moe_pregate 1"),
    ):
        saved = SavedModel.open(small / "model.pt", keep_shards=True)
        # A layer does not support output masking together with moe_prescore.
        saved.options.update({"moe_eom": 0.0, key: value})
        with pytest.raises(ValueError) as error:
            to_hf.convert(saved, tmp_path / "b", 10**9)
        assert sentence in str(error.value) and not (tmp_path / "b").exists()


def test_output_masking_and_output_scaling_are_exported_as_one_option(small, tmp_path):
    saved = SavedModel.open(small / "model.pt", keep_shards=True)
    assert saved.options["moe_eom"] == 0.2
    saved.options.update({"moe_eom": 0.5, "moe_routed_scaling_factor": 0.5})
    to_hf.convert(saved, tmp_path / "b", 10**9)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["moe_token_dropout"] == 0.75


def refused(source, **how):
    """Assert that the conversion of a folder fails and writes nothing, and return the error message."""
    output = source.with_name("refused")
    with pytest.raises(ValueError) as error:
        converted(source, output, **how)
    assert not output.exists() and not [*source.parent.glob("refused*")]
    return str(error.value)


def test_inconsistent_router_options_raise_an_error(tmp_path):
    folder = nllb.plain_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    for changes, sentence in (
        ({"second_expert_policy": "best"}, "second_expert_policy 'best'"),
        ({"moe_token_dropout": 1.0}, "moe_token_dropout 1.0"),
        ({"num_experts": 1}, "num_experts 1"),
        ({"num_experts": 10**12}, "num_experts 1000000000000"),
        ({"num_experts": 5}, "of shape (4, 16), but config.json has 5 experts"),
        ({"decoder_sparse_step": 1}, "lacks the tensor model.decoder.layers.0.ffn.router"),
        ({"encoder_sparse_step": 0, "decoder_sparse_step": 0}, "no layer has experts"),
        ({"expert_capacity": "many"}, "expert_capacity 'many'"),
        ({"router_dtype": "float8"}, "router_dtype 'float8'"),
        ({"second_expert_policy": "random", "normalize_router_prob_before_dropping": True},
         "normalizes only the first expert's weight"),
        ({"decoder_ffn_dim": 25}, "requires (25, 16)"),
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config | changes))
        assert sentence in refused(folder), changes


# The IDs of the kept experts. Encoder layers 1 and 3 and decoder layers 1 and 3 have four experts each.
GLOBAL = [0, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14]


def test_keep_experts_gives_the_same_model_as_convert_prune(tmp_path):
    theirs = nllb.moe_model()
    file = tmp_path / "keep.json"
    file.write_text(json.dumps(GLOBAL))
    folder = imported(theirs, tmp_path, keep=file)
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
    text = refusal("to-hf", folder / "model.pt", "--output", tmp_path / "back")
    assert "--moe-expert-count 2,4,3,2" in text


PAIRS = ("deu_Latn-fra_Latn",)
LAYERS = [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in (1, 3)]


def test_every_format_of_the_list_of_kept_experts_gives_the_same_model(tmp_path):
    file = tmp_path / "keep.json"
    by_language = {"deu_Latn": [0, 3, 4, 5, 6, 7, 8], "fra_Latn": [1, 9, 10, 11, 12, 14]}
    for content, pairs in ((GLOBAL, ()), (by_language, PAIRS), ({PAIRS[0]: GLOBAL}, PAIRS)):
        file.write_text(json.dumps(content))
        kept = kept_experts(file, pairs, LAYERS, 4, 2)
        assert kept == dict(zip(LAYERS, ([0, 3], [0, 1, 2, 3], [1, 2, 3], [0, 2]), strict=True))


@pytest.mark.parametrize(("content", "pairs", "sentence"), [
    ("[0, 16]", (), "has [0, 16] in place of expert IDs from 0 to 15"),
    ('{"encoder_1": "all"}', (), "in place of expert IDs"),
    ("[0, 1]", (), "keeps 0 experts in encoder.layers.3"),
    ("[0, 1]", PAIRS, "has no languages"),
    ('{"deu_Latn": [0, 1]}', PAIRS, "no list for 'fra_Latn'"),
    ("{", (), "cannot be read"),
])  # fmt: skip
def test_a_wrong_list_of_kept_experts_raises_an_error(content, pairs, sentence, tmp_path):
    (tmp_path / "keep.json").write_text(content)
    with pytest.raises(ValueError) as error:
        kept_experts(tmp_path / "keep.json", pairs, LAYERS, 4, 2)
    assert sentence in str(error.value)


def test_tensor_names_without_a_prefix_and_pickled_files_are_read(tmp_path):
    """The released NLLB-MoE has .bin files, and its tensor names lack the prefix "model."."""
    theirs = nllb.moe_model()
    source = nllb.save(theirs, tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for part in range(3):
        file = f"pytorch_model-{part + 1:05d}-of-00003.bin"
        own = {name.removeprefix("model."): tensors[name] for name in names[part::3]}
        torch.save(own, source / file)
        where |= dict.fromkeys(own, file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"new_switch": True}))
    printed = convert("from-hf", source, "--output", tmp_path / "ours")
    assert "note: config.json has entries that are not converted: 'new_switch', 'router_ignore" in printed
    same_logits(theirs, ft.from_checkpoint(tmp_path / "ours").models[0], True)


def content(folder):
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def test_the_import_holds_one_expert_in_memory_and_an_interrupted_import_leaves_no_file(
    released, tmp_path, monkeypatch
):
    plain, alive, most = ReleasedFolder.read, weakref.WeakSet(), []

    def read(folder, name):
        tensor = plain(folder, name)
        if ".experts." in name:
            alive.add(tensor)
            most.append(len(alive))
            if len(most) == stop:
                raise KeyboardInterrupt
        return tensor

    monkeypatch.setattr(ReleasedFolder, "read", read)
    stop = 40
    with pytest.raises(KeyboardInterrupt):
        converted(released, tmp_path / "ours", expert_dtype="int8")
    assert not [*tmp_path.iterdir()]
    stop = 0
    converted(released, tmp_path / "ours", expert_dtype="int8")
    assert len(most) > 40 + 4 * 4 * 4 and max(most) <= 2
    before = content(tmp_path / "ours")
    monkeypatch.setattr(atomic_save, "write", full)
    message = refusal("from-hf", released, "--output", tmp_path / "ours", "--overwrite")
    assert "No space left on device" in message and "free disk space" in message
    assert content(tmp_path / "ours") == before and os.listdir(tmp_path) == ["ours"]


def full(*arguments):
    raise OSError(28, "No space left on device")


def test_errors_name_a_corrupt_file_and_a_tensor_that_is_not_finite(tmp_path):
    folder = nllb.plain_folder(tmp_path / "hf", files=1)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.decoder.layers.3.ffn.experts.expert_2.fc1.weight"][3, 5] = float("nan")
    save_file(tensors, file)
    message = refused(folder, expert_dtype="int8")
    assert "--expert-dtype int8 cannot store expert 2 of decoder.layers.3.fc1.experts.fc1_weight" in message
    os.truncate(file, file.stat().st_size // 2)
    assert f"{file} is corrupt" in refused(folder)
