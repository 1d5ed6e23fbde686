"""`convert from-hf` and `to-hf`: small random models of transformers, logits and outputs both ways."""

import json
import shutil

import pytest
import torch
from fairseq import checkpoint_utils
from released_models import MODELS, TEXT, saved
from safetensors.torch import load_file, save_file
from tool_in_process import convert, refusal

import fairseq_tutel as ft
from fairseq_tutel.convert.options import RELEASED
from fairseq_tutel.convert.released.families import FAMILIES
from fairseq_tutel.convert.released.families.speech import convolutions
from fairseq_tutel.plugin import register

transformers = pytest.importorskip("transformers")
register()
SEQ2SEQ = ("m2m100", "nllb", "bart", "mbart", "mbart50", "fsmt")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A function: name -> (model, tokenizer, folder, converted folder); each is made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model, tokenizer = saved(name, folder / "hf")
            convert("from-hf", folder / "hf", "--output", folder / "ours")
            made[name] = model, tokenizer, folder / "hf", folder / "ours"
        return made[name]

    return get


def test_the_command_line_names_every_family():
    assert tuple(FAMILIES) == RELEASED


def opened(folder):
    """Return the fairseq model and task of a converted folder, opened by fairseq itself."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "model.pt")], arg_overrides={"data": str(folder)}
    )
    return models[0].eval(), task


def batch(size):
    """Return two sequences of token IDs, the second padded, and the mask of tokens."""
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
    """Return the numbers of source and target tokens."""
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
    """Return the names as parameters of a test; all but the quick ones are marked as long."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", some(TEXTUAL, "m2m100", "bart", "mbart50", "opt", "roberta", "fsmt"))
def test_logits_are_equal_in_both_directions(name, released, tmp_path):
    model, _, _, folder = released(name)
    compared(name, model, opened(folder)[0])
    back = tmp_path / "back"
    convert("to-hf", folder / "model.pt", "--output", back)
    again = type(model).from_pretrained(back).eval()
    compared(name, again, opened(folder)[0])
    theirs, own = model.state_dict(), again.state_dict()
    assert own.keys() == theirs.keys()
    for key, tensor in theirs.items():
        if "token_type" in key or (name in ("roberta", "xlm_roberta") and "position_embeddings" in key):
            continue  # the row of the token type is part of our positions
        assert torch.equal(own[key], tensor), key


@pytest.mark.parametrize("name", some(TEXTUAL, "m2m100", "bart", "xglm"))
def test_token_ids_are_equal(name, released):
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
def test_greedy_translations_are_equal(name, source, target, released):
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


def test_a_language_must_be_given_and_known(released):
    interface = ft.from_checkpoint(released("nllb")[3], device="cpu")
    with pytest.raises(ValueError, match="source_lang is None, which is not a language"):
        interface.translate("a boat")
    with pytest.raises(ValueError, match="target_lang is 'xx', which is not a language"):
        interface.translate("a boat", source_lang="eng_Latn", target_lang="xx")


@pytest.mark.parametrize("name", some(["xglm", "opt"], "xglm"))
def test_greedy_continuations_are_equal(name, released):
    model, tokenizer, _, folder = released(name)
    interface = ft.from_checkpoint(folder, device="cpu")
    for text in TEXT[:4]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert ids[0, 0] == 2
        out = model.generate(ids, num_beams=1, do_sample=False, max_new_tokens=6, suppress_tokens=[1])
        tokens = interface.encode(text)[:-1]
        ours = interface.generate([tokens], beam=1, max_len_a=0, max_len_b=ids.shape[1] + 5)[0][0]["tokens"]
        assert ours.tolist()[:-1] == out[0, 1 : len(ours)].tolist()


@pytest.mark.parametrize("name", some(["roberta", "xlm_roberta"], "roberta"))
def test_the_same_words_fill_a_mask(name, released):
    model, tokenizer, _, folder = released(name)
    interface = ft.from_checkpoint(folder, device="cpu")
    ids = tokenizer("the <mask> is near", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, ids[0].tolist().index(tokenizer.mask_token_id)]
    found = interface.fill_mask("the <mask> is near", topk=3)
    special = [0, 1, 2, 3, tokenizer.mask_token_id]
    logits[special] = float("-inf")
    best = logits.topk(3).indices.tolist()
    assert [text for _, _, text in found] == [tokenizer.decode([i]).strip() for i in best]


@pytest.mark.parametrize(
    "name", some(["wav2vec2", "wav2vec2_large", "hubert", "hubert_large"], "wav2vec2", "hubert_large")
)
def test_features_of_speech_are_equal_in_both_directions(name, released, tmp_path):
    model, _, _, folder = released(name)
    ours, _ = opened(folder)
    torch.manual_seed(0)
    source = torch.randn(2, 400)
    state = torch.load(folder / "model.pt", weights_only=False)
    state["cfg"]["model"]["latent_dim"] = 0  # in fairseq: as final_dim
    torch.save(state, tmp_path / "model.pt")
    convert("to-hf", tmp_path / "model.pt", "--output", tmp_path / "back")
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


# Options of config.json whose value is not supported, and the sentence.
REFUSED = (
    ("m2m100", {"tie_word_embeddings": False}, "config.json has tie_word_embeddings False"),
    ("m2m100", {"activation_function": "silu"}, "config.json has activation_function 'silu'"),
    ("m2m100", {"d_model": 32}, "of shape (143, 16), but config.json requires (143, 32)"),
    ("m2m100", {"d_model": "16"}, "config.json has d_model '16', which is not of the type int"),
    ("m2m100", {"vocab_size": 9}, "config.json has vocab_size 9, but the embedding table has 143 rows"),
    ("m2m100", {"encoder_layers": 3}, "lacks the tensor model.encoder.layers.2.self_attn.k_proj.weight"),
    ("m2m100", {"encoder_layers": 1}, "has the tensor model.encoder.layers.1"),
    ("m2m100", {"encoder_attention_heads": 5}, "5 attention heads for a width of 16"),
    ("m2m100", {"encoder_attention_heads": -4}, "-4 attention heads for a width of 16"),
    ("m2m100", {"encoder_layers": 10**12}, "has encoder_layers 1000000000000, but the range is"),
    ("m2m100", {"dropout": 7.0}, "config.json has dropout 7.0, but the range is 0 to 1"),
    ("m2m100", {"dropout": float("nan")}, "config.json has dropout nan, but the range is 0 to 1"),
    ("m2m100", {"activation_function": "x" * 999}, f"activation_function '{'x' * 59}…, which"),
    ("m2m100", {"model_type": "t5"}, "config.json has model_type 't5', which cannot be converted"),
    ("m2m100", {"architectures": ["Other"]}, "config.json has architectures ['Other']"),
    ("opt", {"do_layer_norm_before": False}, "config.json has do_layer_norm_before False"),
    ("roberta", {"type_vocab_size": 2}, "config.json has type_vocab_size 2"),
    ("fsmt", {"langs": ["en"]}, "config.json has langs ['en']"),
)


@pytest.mark.parametrize(("name", "change", "sentence"), REFUSED)
def test_an_unsupported_option_is_refused(name, change, sentence, released, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(released(name)[2], source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    assert sentence in refusal("from-hf", source, "--output", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_list_of_convolutions_has_a_limited_length():
    assert convolutions("[(4, 3, 2)] + [(5, 2, 1)] * 2") == [(4, 3, 2), (5, 2, 1), (5, 2, 1)]
    for text in ("[(4, 3, 2)]" + " * 99" * 9, "[(4, 3)]", "[4] * 2", "print()", "[" * 9999):
        with pytest.raises(ValueError, match="--conv-feature-layers is "):
            convolutions(text)


# The name of a tensor without its prefix, and another value of it.
WRONG_TENSORS = (
    ("m2m100", "encoder.layers.0.self_attn.k_proj.weight", torch.zeros(6)),
    ("m2m100", "encoder.layers.0.fc1.bias", torch.zeros(16)),
    ("m2m100", "encoder.layers.0.fc2.weight", torch.zeros(48, 16)),
    ("m2m100", "decoder.layer_norm.bias", torch.zeros(1)),
    ("m2m100", "decoder.layers.0.encoder_attn.v_proj.bias", torch.zeros(16, dtype=torch.int64)),
    ("m2m100", "encoder.embed_tokens.weight", torch.zeros(())),
    ("roberta", "embeddings.token_type_embeddings.weight", torch.zeros(())),
)


@pytest.mark.parametrize(("name", "ours", "tensor"), WRONG_TENSORS)
def test_a_tensor_of_another_shape_or_of_integers_is_refused(name, ours, tensor, released, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(released(name)[2], source)
    weights = load_file(source / "model.safetensors")
    prefix = "roberta" if name == "roberta" else "model"
    theirs = "model.shared.weight" if "embed_tokens" in ours else f"{prefix}.{ours}"
    assert theirs in weights
    save_file(weights | {theirs: tensor}, source / "model.safetensors", {"format": "pt"})
    told = refusal("from-hf", source, "--output", tmp_path / "ours")
    kind = "of torch.int64" if not tensor.is_floating_point() else f"of shape {tuple(tensor.shape)}"
    assert ours in told and kind in told
    assert not (tmp_path / "ours").exists()


def test_a_key_of_added_tokens_must_be_a_number(released, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(released("m2m100")[2], source)
    file = source / "tokenizer_config.json"
    file.write_text(json.dumps({"added_tokens_decoder": {"abc": {"content": "x"}}}))
    told = refusal("from-hf", source, "--output", tmp_path / "ours")
    assert "has a list of added tokens whose values are not token IDs" in told


@pytest.mark.parametrize("content", [b"\xff\xfe a\n", None])
def test_malformed_merges_are_refused(content, released, tmp_path):
    """Without merges.txt, the merges are those of tokenizer.json."""
    source = tmp_path / "hf"
    shutil.copytree(released("bart")[2], source)
    (source / "merges.txt").unlink()
    if content is None:
        vocab = json.loads((source / "vocab.json").read_text())
        (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab, "merges": [1]}}))
    else:
        (source / "merges.txt").write_bytes(content)
    told = refusal("from-hf", source, "--output", tmp_path / "ours")
    assert "has malformed merges of a BPE" in told


def test_a_folder_around_the_input_is_not_replaced(released, tmp_path):
    """The input may be several levels below --output."""
    output = tmp_path / "ours"
    source = output / "below" / "hf"
    shutil.copytree(released("m2m100")[2], source)
    (output / "model.pt").touch()
    told = refusal("from-hf", source, "--output", output, "--overwrite")
    assert "which holds the input" in told
    assert (source / "config.json").is_file()


def test_an_unknown_entry_of_the_configuration_is_printed(released, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(released("bart")[2], source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"new_switch": True}))
    printed = convert("from-hf", source, "--output", tmp_path / "ours")
    assert "note: config.json has entries that are not converted: 'new_switch'." in printed


def test_a_bias_of_the_logits_must_be_zero(released, tmp_path):
    model, _, folder, _ = released("bart")
    source = tmp_path / "hf"
    shutil.copytree(folder, source)
    weights = load_file(source / "model.safetensors")
    weights["final_logits_bias"] = torch.ones(1, model.config.vocab_size)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    told = refusal("from-hf", source, "--output", tmp_path / "ours")
    assert "has a final_logits_bias that is not zero" in told


@pytest.mark.parametrize("form", some(["sharded", "bin", "sharded_bin", "bare"], "sharded", "sharded_bin"))
def test_all_forms_of_the_weights_are_read_alike(form, released, tmp_path):
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
    convert("from-hf", source, "--output", tmp_path / "ours")
    one, two = (torch.load(path / "model.pt")["model"] for path in (ours, tmp_path / "ours"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(("file", "damage", "sentence"), [
    ("config.json", lambda content: None, "which has no config.json"),
    ("config.json", lambda content: content[:-9], "cannot be read as JSON"),
    ("config.json", lambda content: b"[]", "holds no JSON object"),
    ("model.safetensors", lambda content: None, "has neither model.safetensors nor pytorch_model.bin"),
    ("model.safetensors", lambda content: content[:-99], "is corrupt or lacks a tensor"),
    ("vocab.json", lambda content: b"{}", "has a vocab.json whose values are not token IDs"),
])  # fmt: skip
def test_a_damaged_folder_is_refused(file, damage, sentence, released, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(released("m2m100")[2], source)
    content = damage((source / file).read_bytes())
    (source / file).unlink()
    if content is not None:
        (source / file).write_bytes(content)
    assert sentence in refusal("from-hf", source, "--output", tmp_path / "ours")


def test_an_index_names_files_in_its_folder_alone(released, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(released("m2m100")[2], source)
    (source / "model.safetensors").unlink()
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    words = ("from-hf", source, "--output", tmp_path / "ours")
    assert "is not a .safetensors file in the folder" in refusal(*words)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert "lacks the file model-1.safetensors" in refusal(*words)


def test_pickled_code_does_not_run(released, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(released("m2m100")[2], source)
    (source / "model.safetensors").unlink()
    torch.save({"a": Harmful()}, source / "pytorch_model.bin")
    assert "is not loaded" in refusal("from-hf", source, "--output", tmp_path / "ours")
    assert not (source / "ran").exists()


class Harmful:
    def __reduce__(self):
        return open, ("ran", "w")


@pytest.mark.parametrize(("name", "change", "sentence"), [
    ("m2m100", {"no_cross_attention": True}, "has no_cross_attention True, but M2M100"),
    ("m2m100", {"decoder_embed_dim": 8}, "but transformers has one value for these options"),
    ("m2m100", {"activation_fn": "linear"}, "has activation_fn linear, which transformers does not have"),
    ("opt", {"scale_fc": True}, "has scale_fc True, but OPTForCausalLM has only False"),
])  # fmt: skip
def test_a_model_without_counterpart_is_refused_by_name(name, change, sentence, released, tmp_path):
    state = torch.load(released(name)[3] / "model.pt", weights_only=False)
    model = state["cfg"]["model"]
    (model if isinstance(model, dict) else vars(model)).update(change)
    torch.save(state, tmp_path / "changed.pt")
    family = {"m2m100": "m2m_100"}.get(name, name)
    words = ("to-hf", tmp_path / "changed.pt", "--output", tmp_path / "back")
    assert sentence in refusal(*words, "--family", family)
    assert "no class of transformers equals; the closest family is" in refusal(*words)


def test_the_closest_family_has_an_encoder_and_a_decoder_as_the_model(released, tmp_path):
    state = torch.load(released("m2m100")[3] / "model.pt", weights_only=False)
    post_norm = {"encoder_normalize_before": False, "decoder_normalize_before": False}
    vars(state["cfg"]["model"]).update(post_norm)
    torch.save(state, tmp_path / "changed.pt")
    message = refusal("to-hf", tmp_path / "changed.pt", "--output", tmp_path / "back")
    assert "the closest family is fsmt: INPUT has share_all_embeddings True" in message


def test_languages_that_fairseq_inferred_are_inferred_again(released, tmp_path):
    state = torch.load(released("fsmt")[3] / "model.pt", weights_only=False)
    for part in ("task", "model"):
        own = state["cfg"][part]
        own = own if isinstance(own, dict) else vars(own)
        own |= {"source_lang": None, "target_lang": None, "data": str(tmp_path / "data")}
    torch.save(state, tmp_path / "model.pt")
    words = ("to-hf", tmp_path / "model.pt", "--output", tmp_path / "back")
    assert "names no languages" in refusal(*words)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.en-de.en.bin").touch()
    convert(*words)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["langs"] == ["en", "de"]


@pytest.mark.parametrize("name", ["nllb", "fsmt"])
def test_words_added_to_a_tokenizer_are_refused(name, released, tmp_path):
    """Their BPE finds such a word in a text before it splits the text; ours cannot."""
    _, tokenizer, folder, _ = released(name)
    source = tmp_path / "hf"
    shutil.copytree(folder, source)
    added = type(tokenizer).from_pretrained(folder)
    added.add_tokens(["<marker>"], special_tokens=True)
    added.save_pretrained(source)
    words = ("from-hf", source, "--output", tmp_path / "ours")
    if name == "nllb":  # it has unused rows
        assert "note: the tokens '<marker>' keep their IDs" in convert(*words, "--overwrite")
    added.add_tokens(["zebra"])
    added.save_pretrained(source)
    assert "added to its tokenizer ('zebra')" in refusal(*words, "--overwrite")


def test_an_embedding_without_a_row_for_a_symbol_of_the_task_is_refused(released, tmp_path):
    """fairseq's task adds <mask>, which this tokenizer lacks."""
    source = tmp_path / "hf"
    shutil.copytree(released("roberta")[2], source)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (source / name).unlink()
    vocab = (source / "vocab.json").read_text()
    (source / "vocab.json").write_text(vocab.replace("<mask>", "unmasked"))
    message = refusal("from-hf", source, "--output", tmp_path / "ours")
    assert "has 301 rows" in message and "has 302 symbols" in message


def test_bart_fills_and_fsmt_and_mbart_translate_as_in_transformers(released):
    """Greedy outputs; mBART-25 starts with the target language, and FSMT has two dictionaries."""
    for name, options in (
        ("bart", {}),
        ("fsmt", {}),
        ("mbart", {"source_lang": "en_XX", "target_lang": "ro_RO"}),
    ):
        model, tokenizer, _, folder = released(name)
        interface = ft.from_checkpoint(folder, device="cpu")
        # fairseq never generates the start in the first place; a random model would.
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


def test_an_existing_folder_is_replaced_only_if_this_tool_wrote_it(released, tmp_path):
    _, _, source, ours = released("m2m100")
    words = ("from-hf", source, "--output", tmp_path / "ours")
    convert(*words)
    assert "exists; give another path, or add --overwrite" in refusal(*words)
    (tmp_path / "ours" / "dict.txt").unlink()
    convert(*words, "--overwrite")
    assert (tmp_path / "ours" / "dict.en.txt").read_bytes() == (ours / "dict.txt").read_bytes()
    (tmp_path / "other").mkdir()
    others = ("from-hf", source, "--output", tmp_path / "other", "--overwrite")
    assert "has no model.pt, so it is not replaced" in refusal(*others)
    shutil.copytree(source, tmp_path / "hf")
    export = ("to-hf", ours / "model.pt", "--output", tmp_path / "hf")
    assert "exists; give another path, or add --overwrite" in refusal(*export)
    missing = ("--tokenizer", tmp_path / "none")
    assert "which is not a folder" in refusal(*export, "--overwrite", *missing)
    convert(*export, "--overwrite", "--max-shard-size", "20KB")
    assert len([*(tmp_path / "hf").glob("model-*.safetensors")]) > 1
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again("a boat")["input_ids"] == released("m2m100")[1]("a boat")["input_ids"]
