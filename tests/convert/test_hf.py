"""Small random models give equal logits in transformers and, after `convert from-hf`, in fairseq."""

import contextlib
import json
import shutil

import pytest
import torch
from fairseq import checkpoint_utils
from released_models import MODELS, TEXT, saved
from safetensors.torch import load_file, save_file
from tool_in_process import convert, refusal

import fairseq_tutel as ft
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.released import from_hf, output, to_hf
from fairseq_tutel.convert.released.families.speech import convolutions
from fairseq_tutel.convert.released.folder import ReleasedFolder
from fairseq_tutel.plugin import register

transformers = pytest.importorskip("transformers")
register()
SEQ2SEQ = ("m2m100", "nllb", "bart", "mbart", "mbart50", "fsmt")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Return a cached function from a model name to (model, tokenizer, folder, converted folder)."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model, tokenizer = saved(name, folder / "hf")
            imported(folder / "hf", folder / "ours")
            made[name] = model, tokenizer, folder / "hf", folder / "ours"
        return made[name]

    return get


def imported(source, output):
    """Convert a model folder, and return the printed notes."""
    return from_hf.convert(ReleasedFolder(source), output)[1]


def exported(path, output):
    return to_hf.convert(SavedModel.open(path), output, 10**9)


def opened(folder):
    """Open a converted folder with fairseq's functions, and return the model and the task."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "model.pt")], arg_overrides={"data": str(folder)}
    )
    return models[0].eval(), task


def batch(size):
    """Return two sequences of token IDs, of which the second is padded, and the mask of real tokens."""
    torch.manual_seed(2)
    ids = torch.randint(4, size, (2, 9))
    ids[:, 0], ids[0, -1], ids[1, 6], ids[1, 7:] = 0, 2, 2, 1
    return ids, ids.ne(1)


def their_logits(name, model, ids, mask):
    kwargs = {"use_cache": False} if name == "fsmt" else {}
    if name in SEQ2SEQ:
        kwargs["decoder_input_ids"] = decoder_input(model, ids)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask.long(), **kwargs).logits


def sizes(model):
    """Return the sizes of the source and target vocabularies."""
    config = model.config
    if config.model_type == "fsmt":
        return config.src_vocab_size, config.tgt_vocab_size
    return config.vocab_size, config.vocab_size


def decoder_input(model, ids):
    size = sizes(model)[1]
    return torch.cat([torch.full((2, 1), 2), ids[:, 1:6] % (size - 4) + 4], 1)


def our_logits(name, ours, model, ids, mask):
    with torch.no_grad():
        if name in SEQ2SEQ:
            return ours(ids, mask.sum(1), decoder_input(model, ids))[0]
        return ours(ids)[0]


def compared(name, model, ours):
    ids, mask = batch(sizes(model)[0])
    theirs, own = their_logits(name, model, ids, mask), our_logits(name, ours, model, ids, mask)
    if name not in SEQ2SEQ:
        theirs, own = theirs[mask], own[mask]
    assert theirs.std() > 0.1
    torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


TEXTUAL = [name for name in MODELS if not name.startswith(("wav2vec2", "hubert"))]


def some(names, *quick):
    """Return model names as test parameters, and mark all except the quick models as long."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", some(TEXTUAL, "m2m100", "bart", "mbart50", "opt", "roberta", "fsmt"))
def test_logits_are_equal_after_conversion_in_both_directions(name, released, tmp_path):
    model, _, _, folder = released(name)
    compared(name, model, opened(folder)[0])
    back = tmp_path / "back"
    exported(folder / "model.pt", back)
    again = type(model).from_pretrained(back).eval()
    compared(name, again, opened(folder)[0])
    theirs, own = model.state_dict(), again.state_dict()
    assert own.keys() == theirs.keys()
    for key, tensor in theirs.items():
        if "token_type" in key or (name in ("roberta", "xlm_roberta") and "position_embeddings" in key):
            continue  # Conversion adds the token-type embedding to the position table.
        assert torch.equal(own[key], tensor), key


@pytest.mark.parametrize("name", some(TEXTUAL, "m2m100", "bart", "xglm"))
def test_token_ids_of_a_converted_model_equal_those_of_the_released_tokenizer(name, released):
    _, tokenizer, _, folder = released(name)
    interface = ft.from_checkpoint(folder, device="cpu")
    dictionary = interface.task.source_dictionary
    for text in TEXT:
        words = interface.bpe.encode(interface.tokenize(text) if name == "fsmt" else text)
        ids = dictionary.encode_line(words, append_eos=False, add_if_not_exist=False)
        assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"], text
    language = {"m2m100": "en", "nllb": "eng_Latn", "mbart": "en_XX", "mbart50": "en_XX"}.get(name)
    if language:
        form = "[{}]" if name.startswith("mbart") else "__{}__"
        token = f"__{language}__" if name == "m2m100" else language
        assert dictionary.index(form.format(language)) == tokenizer.convert_tokens_to_ids(token)


@pytest.mark.parametrize(("name", "source", "target"), [
    ("nllb", "eng_Latn", "fra_Latn"),
    pytest.param("m2m100", "en", "fr", marks=pytest.mark.long),
    pytest.param("mbart50", "en_XX", "ro_RO", marks=pytest.mark.long),
])  # fmt: skip
def test_greedy_translations_after_conversion_equal_those_of_transformers(name, source, target, released):
    model, tokenizer, _, folder = released(name)
    interface = ft.from_checkpoint(folder, device="cpu")
    tokenizer.src_lang = source
    token = f"__{target}__" if name == "m2m100" else target
    for text in TEXT[:4]:
        out = model.generate(
            **tokenizer(text, return_tensors="pt"), num_beams=1, do_sample=False, max_new_tokens=8,
            forced_bos_token_id=tokenizer.convert_tokens_to_ids(token), suppress_tokens=[1],
            decoder_start_token_id=2,
        )  # fmt: skip
        options = {"beam": 1, "max_len_a": 0, "max_len_b": 7}
        ours = interface.translate(text, source_lang=source, target_lang=target, **options)
        tokens = interface.generate([interface.encode(text)], **options)[0][0]["tokens"]
        assert tokens.tolist()[:-1] == out[0, 1 : len(tokens)].tolist() and len(tokens) > 3
        assert ours == interface.decode(tokens)


@pytest.mark.parametrize("name", some(["xglm", "opt"], "xglm"))
def test_greedy_continuations_of_a_converted_model_equal_those_of_transformers(name, released):
    model, tokenizer, _, folder = released(name)
    interface = ft.from_checkpoint(folder, device="cpu")
    for text in TEXT[:4]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert ids[0, 0] == 2
        out = model.generate(ids, num_beams=1, do_sample=False, max_new_tokens=6, suppress_tokens=[1])
        tokens = interface.encode(text)[:-1]
        ours = interface.generate([tokens], beam=1, max_len_a=0, max_len_b=ids.shape[1] + 5)[0][0]["tokens"]
        assert ours.tolist()[:-1] == out[0, 1 : len(ours)].tolist()


@pytest.mark.parametrize(
    "name", some(["wav2vec2", "wav2vec2_large", "hubert", "hubert_large"], "wav2vec2", "hubert_large")
)
def test_speech_features_are_equal_after_conversion_in_both_directions(name, released, tmp_path):
    model, _, _, folder = released(name)
    ours, _ = opened(folder)
    torch.manual_seed(0)
    source = torch.randn(2, 400)
    state = torch.load(folder / "model.pt", weights_only=False)
    state["cfg"]["model"]["latent_dim"] = 0  # With 0, fairseq uses final_dim as latent_dim.
    torch.save(state, tmp_path / "model.pt")
    exported(tmp_path / "model.pt", tmp_path / "back")
    again = type(model).from_pretrained(tmp_path / "back").eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    with torch.no_grad():
        found = ours.extract_features(source, None)
        found = found["x"] if isinstance(found, dict) else found[0]
        for theirs in (model, again):
            features = getattr(theirs, "wav2vec2", theirs)(source).last_hidden_state
            torch.testing.assert_close(found, features, atol=1e-5, rtol=1e-5)


# Each entry has a model, a change of config.json that is not supported, and a part of the error message.
REFUSED = (
    ("m2m100", {"tie_word_embeddings": False}, "config.json has tie_word_embeddings False"),
    ("m2m100", {"activation_function": "silu"}, "config.json has activation_function 'silu'"),
    ("m2m100", {"d_model": 32}, "of shape (143, 16), but config.json requires (143, 32)"),
    ("m2m100", {"d_model": "16"}, "config.json has d_model '16'; give a number"),
    ("m2m100", {"vocab_size": 9}, "config.json has vocab_size 9, but the embedding table has 143 rows"),
    ("m2m100", {"encoder_layers": 3}, "lacks the tensor model.encoder.layers.2.self_attn.k_proj.weight"),
    ("m2m100", {"encoder_layers": 1}, "has the tensor model.encoder.layers.1"),
    ("m2m100", {"encoder_layers": 10**12}, "has encoder_layers 1000000000000; give a number from"),
    ("m2m100", {"dropout": 7.0}, "config.json has dropout 7.0; give a number from 0 to 1"),
    ("m2m100", {"model_type": "t5"}, "config.json has model_type 't5', which cannot be converted"),
    ("m2m100", {"architectures": ["Other"]}, "config.json has architectures ['Other']"),
    ("opt", {"do_layer_norm_before": False}, "config.json has do_layer_norm_before False"),
    ("roberta", {"type_vocab_size": 2}, "config.json has type_vocab_size 2"),
    ("fsmt", {"langs": ["en"]}, "config.json has langs ['en']"),
)


@pytest.fixture
def copied(released, tmp_path):
    """Return a function that copies a released folder, changes the copy, and returns its path."""

    def copy(name, config=(), tensors=()):
        source = tmp_path / "hf"
        shutil.copytree(released(name)[2], source)
        old = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(old | dict(config)))
        if tensors:
            weights = load_file(source / "model.safetensors")
            save_file(weights | dict(tensors), source / "model.safetensors", {"format": "pt"})
        return source

    return copy


def refused(source, sentence):
    """Assert that the conversion of a folder fails with this sentence and writes nothing."""
    with pytest.raises(ValueError) as error:
        imported(source, source.with_name("ours"))
    assert sentence in str(error.value)
    assert not source.with_name("ours").exists()


@pytest.mark.parametrize(("name", "change", "sentence"), REFUSED)
def test_an_unsupported_option_in_config_json_raises_an_error(name, change, sentence, copied):
    refused(copied(name, change), sentence)


def test_config_json_must_not_list_very_many_convolutions():
    assert convolutions("[(4, 3, 2)] + [(5, 2, 1)] * 2") == [(4, 3, 2), (5, 2, 1), (5, 2, 1)]
    for text in ("[(4, 3, 2)] * 9999", "[(4, 3, 2)]" + " * 99" * 9, "[(4, 3)]", "[4] * 2", "print()"):
        with pytest.raises(ValueError, match="--conv-feature-layers is "):
            convolutions(text)


FC1 = "model.encoder.layers.0.fc1.bias"
TYPES = "roberta.embeddings.token_type_embeddings.weight"
WRONG_TENSORS = (
    (
        "m2m100",
        {FC1: torch.zeros(16)},
        "of torch.float32 and of shape (16,), but config.json requires (48,)",
    ),
    ("m2m100", {FC1: torch.zeros(48, dtype=torch.int64)}, "of torch.int64"),
    ("m2m100", {"model.shared.weight": torch.zeros(())}, "of shape (), but config.json"),
    ("roberta", {TYPES: torch.zeros(())}, "of shape (), which cannot be added"),
    (
        "bart",
        {"final_logits_bias": torch.ones(1, 301)},
        "has the tensor final_logits_bias that is not zero",
    ),
    ("bart", {"new": torch.ones(1)}, "has the tensor new, which"),
)


@pytest.mark.parametrize(("name", "tensors", "sentence"), WRONG_TENSORS)
def test_a_wrong_tensor_in_a_released_folder_raises_an_error(name, tensors, sentence, copied):
    refused(copied(name, tensors=tensors), sentence)


def test_a_note_names_an_unknown_entry_of_config_json(copied, tmp_path):
    notes = imported(copied("bart", {"new_switch": True}), tmp_path / "ours")
    assert "config.json has entries that are not converted: 'new_switch'." in notes


@pytest.mark.parametrize("form", some(["sharded", "bin", "sharded_bin", "bare"], "sharded", "sharded_bin"))
def test_all_file_formats_of_released_weights_give_equal_weights(form, released, tmp_path):
    model, _, folder, ours = released("m2m100")
    source = tmp_path / "hf"
    shutil.copytree(folder, source)
    (source / "model.safetensors").unlink()
    weights = dict(model.state_dict())
    if form == "sharded":
        model.save_pretrained(source, max_shard_size="20KB")
        assert len([*source.glob("*.safetensors")]) > 1
    elif form == "bare":
        model.model.save_pretrained(source)
    elif form == "bin":
        torch.save(weights, source / "pytorch_model.bin")
    else:
        names = sorted(weights)
        where = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(names)}
        for file in {*where.values()}:
            torch.save({n: weights[n] for n in names if where[n] == file}, source / file)
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    imported(source, tmp_path / "ours")
    one, two = (torch.load(path / "model.pt")["model"] for path in (ours, tmp_path / "ours"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


DAMAGED = {
    "config.json": ((None, "has no config.json"), (b"{", "be read as JSON"), (b"[]", "no JSON object")),
    "model.safetensors": ((None, "has neither model.safetensors nor"), (b"cut", "is corrupt or lacks")),
    "vocab.json": ((b"{", "has tokenizer files that transformers cannot read"),),
}  # fmt: skip


def test_a_damaged_released_folder_raises_an_error(copied):
    source = copied("m2m100")
    for name, cases in DAMAGED.items():
        before = (source / name).read_bytes()
        for content, sentence in cases:
            (source / name).unlink()
            if content is not None:
                (source / name).write_bytes(content)
            refused(source, sentence)
            (source / name).write_bytes(before)


def test_a_weight_index_that_names_a_file_in_another_folder_raises_an_error(copied):
    source = copied("m2m100")
    (source / "model.safetensors").unlink()
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    refused(source, "is not a .safetensors file in the folder")
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    refused(source, "model-1.safetensors")


def test_from_hf_does_not_run_pickled_code(copied):
    source = copied("m2m100")
    (source / "model.safetensors").unlink()
    torch.save({"a": Harmful()}, source / "pytorch_model.bin")
    refused(source, "is not loaded")
    assert not (source / "ran").exists()


class Harmful:
    def __reduce__(self):
        return open, ("ran", "w")


@pytest.mark.parametrize(("name", "change", "sentence"), [
    ("m2m100", {"no_cross_attention": True}, "is m2m_100: INPUT has no_cross_attention True, but M2M100"),
    ("m2m100", {"decoder_embed_dim": 8}, "but transformers has one value for these options"),
    ("m2m100", {"activation_fn": "linear"}, "has activation_fn linear, which transformers does not have"),
    ("m2m100", {"encoder_normalize_before": False, "decoder_normalize_before": False},
     "the closest family is fsmt: INPUT has share_all_embeddings True"),
    ("opt", {"scale_fc": True}, "is opt: INPUT has scale_fc True, but OPTForCausalLM has only False"),
])  # fmt: skip
def test_a_model_that_fits_no_transformers_class_is_refused(name, change, sentence, released, tmp_path):
    saved = SavedModel.open(released(name)[3] / "model.pt")
    saved.options.update(change)
    with pytest.raises(ValueError) as error:
        to_hf.convert(saved, tmp_path / "back", 10**9)
    assert "no class of transformers equals; the closest family is" in str(error.value)
    assert sentence in str(error.value)


@pytest.mark.parametrize("name", ["nllb", "fsmt"])
def test_words_that_were_added_to_a_tokenizer_raise_an_error(name, released, copied, tmp_path):
    """Unlike fairseq, transformers finds added words in a text before it splits the text."""
    source = copied(name)
    added = type(released(name)[1]).from_pretrained(source)
    added.add_tokens(["<marker>"], special_tokens=True)
    added.save_pretrained(source)
    if name == "nllb":  # The embedding table has unused rows for special tokens.
        (note,) = imported(source, tmp_path / "with marker")
        assert "the tokens '<marker>' keep their IDs" in note
    added.add_tokens(["zebra"])
    added.save_pretrained(source)
    refused(source, "added to its tokenizer ('zebra')")


@pytest.mark.parametrize(
    "name", some(["nllb", "mbart50", "xlm_roberta", "xglm", "roberta", "bart"], "bart")
)
@pytest.mark.parametrize("removed", [(), ("sentencepiece.bpe.model", "vocab.json", "merges.txt")])
def test_a_fast_tokenizer_and_the_dictionary_give_equal_ids(name, removed, released, copied, tmp_path):
    """The released folder has tokenizer.json, with or without other tokenizer files."""
    model, slow, _, _ = released(name)
    source = copied(name)
    fast = getattr(transformers, f"{type(slow).__name__}Fast").from_pretrained(source)
    fast.save_pretrained(source)
    for file in removed:
        (source / file).unlink(missing_ok=True)
    notes = imported(source, tmp_path / "ours")
    assert any("has no SentencePiece model" in note for note in notes) == (
        bool(removed) and name not in ("roberta", "bart")
    )
    lines = (tmp_path / "ours" / "dict.txt").read_text().splitlines()
    symbols = [line.rpartition(" ")[0] for line in lines]
    assert len(symbols) == model.config.vocab_size - 4
    encoder = tmp_path / "ours" / "encoder.json"
    numbers = json.loads(encoder.read_text()) if encoder.exists() else {}
    tokens = {str(i): token for token, i in numbers.items()}
    for i, symbol in enumerate(symbols, 4):
        token = fast.convert_ids_to_tokens(i)
        assert tokens.get(symbol, symbol) in (token, f"__{token}__", f"[{token}]") or token is None, i


def test_bart_fills_masks_and_fsmt_and_mbart_translate_as_in_transformers(released):
    """Compare greedy outputs; mBART-25 starts with the target language, and FSMT has two dictionaries."""
    for name, options in (
        ("bart", {}),
        ("fsmt", {}),
        ("mbart", {"source_lang": "en_XX", "target_lang": "ro_RO"}),
    ):
        model, tokenizer, _, folder = released(name)
        interface = ft.from_checkpoint(folder, device="cpu")
        # fairseq never generates the start symbol first, so transformers must not do it either.
        start = tokenizer.convert_tokens_to_ids("ro_RO") if name == "mbart" else 2
        for text in TEXT[:3]:
            inputs = tokenizer(text, return_tensors="pt")
            forced = {"forced_bos_token_id": 0} if name == "bart" else {}
            out = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], num_beams=1,
                do_sample=False, max_new_tokens=7, suppress_tokens=[1, start], decoder_start_token_id=start,
                use_cache=name != "fsmt", **forced,
            )  # fmt: skip
            lengths = {"beam": 1, "max_len_a": 0, "max_len_b": 6}
            if options:
                interface.translate(text, **options, **lengths)
            tokens = interface.generate([interface.encode(text)], **lengths)[0]
            tokens = tokens[0]["tokens"] if isinstance(tokens, list) else tokens["tokens"]
            assert tokens.tolist()[:-1] == out[0, 1 : len(tokens)].tolist(), name


def test_overwrite_replaces_only_output_folders_of_the_same_command(released, tmp_path):
    _, _, source, ours = released("m2m100")
    words = ("from-hf", source, "--output", tmp_path / "ours")
    assert "model.pt: transformer, task translation_multi_simple_epoch" in convert(*words)
    assert "exists; give another path, or add --overwrite" in refusal(*words)
    (tmp_path / "ours" / "dict.txt").unlink()
    convert(*words, "--overwrite")
    assert (tmp_path / "ours" / "dict.en.txt").read_bytes() == (ours / "dict.txt").read_bytes()
    (tmp_path / "other").mkdir()
    others = ("from-hf", source, "--output", tmp_path / "other", "--overwrite")
    assert "has no model.pt, so it is not replaced" in refusal(*others)
    shutil.copytree(source, tmp_path / "ours" / "below" / "hf")
    inner = ("from-hf", tmp_path / "ours" / "below" / "hf", "--output", tmp_path / "ours", "--overwrite")
    assert "which holds the input" in refusal(*inner)
    assert "remove --expert-dtype" in refusal("from-hf", source, "--output", tmp_path / "x",
                                              "--expert-dtype", "int8")  # fmt: skip
    shutil.copytree(source, tmp_path / "hf")
    export = ("to-hf", ours / "model.pt", "--output", tmp_path / "hf")
    assert "--max-shard-size is 5; give a size" in refusal(*export, "--overwrite", "--max-shard-size", 5)
    missing = ("--tokenizer", tmp_path / "none")
    assert "which is not a folder" in refusal(*export, "--overwrite", *missing)
    convert(*export, "--overwrite", "--max-shard-size", "20KB")
    assert len([*(tmp_path / "hf").glob("model-*.safetensors")]) > 1
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again("a boat")["input_ids"] == released("m2m100")[1]("a boat")["input_ids"]


def test_only_a_complete_output_folder_replaces_an_existing_folder(tmp_path):
    weights = {name: torch.randn(size) for name, size in (("a", 200), ("b", 50), ("c", 1), ("d", 500))}
    for fails in (False, True):
        with contextlib.suppress(ValueError), output.new_folder(tmp_path / "hf") as folder:
            output.write_weights(
                {name: -tensor if fails else tensor for name, tensor in weights.items()}, folder, 1024
            )
            if fails:
                raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    where = json.loads((tmp_path / "hf" / output.INDEX).read_text())["weight_map"]
    files = [load_file(path) for path in sorted((tmp_path / "hf").glob("*.safetensors"))]
    assert [[*file] for file in files] == [["a", "b", "c"], ["d"]] and where.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for file in files for name, tensor in file.items())
