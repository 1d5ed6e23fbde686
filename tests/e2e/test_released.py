"""`convert to-hf` and `from-hf` by the real commands, with models that fairseq trained."""

import json
import math
import re

import pytest
import torch
from cli import USER_DIR, fairseq, refused

import fairseq_tutel as ft
from fairseq_tutel.convert.released.vocabulary import LANGUAGES

TASK = (
    "--task", "translation_multi_simple_epoch", "--langs", "de,en", "--lang-pairs", "de-en,en-de",
    "--encoder-langtok", "src", "--decoder-langtok",
)  # fmt: skip
MODEL = (
    "--arch", "transformer", "--encoder-normalize-before", "--decoder-normalize-before",
    "--share-all-embeddings", "--encoder-layers", 2, "--decoder-layers", 1, "--encoder-embed-dim", 16,
    "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2, "--decoder-embed-dim", 16,
    "--decoder-ffn-embed-dim", 24, "--decoder-attention-heads", 4,
)  # fmt: skip
TRAINING = (
    "--user-dir", USER_DIR, "--optimizer", "adam", "--lr", 0.03, "--max-tokens", 400, "--max-update", 40,
    "--num-workers", 0, "--no-epoch-checkpoints", "--disable-validation", "--log-format", "json",
)  # fmt: skip


def trained(data, folder, *extra):
    """Train a dense model of M2M100's form; return its checkpoint."""
    fairseq("train", data, *TASK, *MODEL, *TRAINING, "--save-dir", folder, *extra)
    return folder / "checkpoint_last.pt"


def translations(data, path, *extra):
    """Return what fairseq-generate prints for the test set, as [(score, text), …]."""
    words = (*TASK, "-s", "de", "-t", "en", "--user-dir", USER_DIR, "--path", path, "--beam", 2)
    output = fairseq("generate", data, *words, "--max-len-b", 8, *extra).output
    return re.findall(r"^D-\d+\t(\S+)\t(.*)$", output, re.M)


def tokenizer_of(data, folder):
    """Write the tokenizer files of M2M100 for a dictionary of fairseq."""
    folder.mkdir()
    words = [line.split()[0] for line in (data / "dict.de.txt").read_text().splitlines()]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *words, "__de__", "__en__"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))


def test_a_trained_model_is_exported_and_imported(mt_data, tmp_path):
    path = trained(mt_data, tmp_path / "run")
    tokenizer_of(mt_data, tmp_path / "tokenizer")
    export = ("convert", "to-hf", path, "--output", tmp_path / "hf")
    assert (
        "M2M100ForConditionalGeneration"
        in fairseq("tutel-__main__", *export, "--tokenizer", tmp_path / "tokenizer").output
    )
    back = ("convert", "from-hf", tmp_path / "hf", "--output", tmp_path / "ours")
    printed = fairseq("tutel-__main__", *back).output
    assert "note: the folder has no SentencePiece model; texts must be encoded before." in printed
    assert "ours/model.pt: transformer, task translation_multi_simple_epoch" in printed
    ours = tmp_path / "ours" / "model.pt"
    one, two = (torch.load(file, weights_only=False)["model"] for file in (path, ours))
    weights = [name for name in one if not name.endswith(("version", "_float_tensor"))]
    assert {*weights} <= {*two} and all(torch.equal(one[name], two[name]) for name in weights)

    expected = translations(mt_data, path)
    assert translations(mt_data, ours) == expected and len({text for _, text in expected}) > 3
    opened = ft.from_checkpoint(tmp_path / "ours", device="cpu")
    texts = (mt_data.parent / "test.de").read_text().splitlines()[:2]
    found = opened.translate(texts, beam=2, source_lang="de", target_lang="en", max_len_a=0, max_len_b=8)
    assert {*found} <= {text for _, text in expected}
    fairseq(
        "train", mt_data, *TASK, *MODEL, *TRAINING, "--save-dir", tmp_path / "tuned", "--max-update", 1,
        "--finetune-from-model", ours,
    )  # fmt: skip


@pytest.mark.parametrize(("extra", "sentence"), [
    (("--decoder-learned-pos",), "has decoder_learned_pos True, but M2M100"),
    (("--moe-freq", 1, "--moe-expert-count", 2, "--arch", "moe_transformer"), "has experts in encoder_0"),
])  # fmt: skip
@pytest.mark.long
def test_a_model_that_transformers_lacks_is_refused_by_name(extra, sentence, mt_data, tmp_path):
    path = trained(mt_data, tmp_path / "run", *extra, "--max-update", 1)
    words = ("convert", "to-hf", path, "--output", tmp_path / "hf", "--family", "m2m_100")
    assert sentence in refused("tutel-__main__", *words)


def encoded(folder, texts):
    """Encode a parallel text with SentencePiece and binarize it; write the tokenizer files of M2M100."""
    sentencepiece = pytest.importorskip("sentencepiece")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    files = {
        (split, side): texts / f"{split}.{side}" for split in ("train", "test") for side in ("de", "en")
    }
    lines = {key: file.read_text().splitlines() for key, file in files.items()}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines["train", "de"] + lines["train", "en"]), minloglevel=2, vocab_size=90,
        model_prefix=str(tokenizer / "sentencepiece.bpe"), hard_vocab_limit=False,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(str(tokenizer / "sentencepiece.bpe.model"))
    for (split, side), text in lines.items():
        pieces = (" ".join(model.Encode(line, out_type=str)) for line in text)
        (folder / f"{split}.{side}").write_text("\n".join(pieces) + "\n")
    fairseq(
        "preprocess", "-s", "de", "-t", "en", "--trainpref", folder / "train", "--testpref",
        folder / "test", "--destdir", folder / "bin", "--joined-dictionary", "--workers", 1,
    )  # fmt: skip
    words = [line.split()[0] for line in (folder / "bin" / "dict.de.txt").read_text().splitlines()]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *words]
    (tokenizer / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    languages = [f"__{language}__" for language in LANGUAGES["m2m100"].split()]
    config = {
        "tokenizer_class": "M2M100Tokenizer", "src_lang": "de", "num_madeup_words": 0,
        "additional_special_tokens": languages,
    }  # fmt: skip
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "bin", tokenizer


@pytest.mark.long
def test_ctranslate2_translates_an_exported_model_alike(mt_data, tmp_path):
    """A model with the languages of M2M100, trained with fairseq: 21 sentences, greedy and beam 4."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    transformers = pytest.importorskip("transformers")
    data, tokenizer = encoded(tmp_path, mt_data.parent)
    languages = ("--langs", ",".join(LANGUAGES["m2m100"].split()), "--lang-pairs", "de-en")
    # CTranslate2 has one number of heads for encoder and decoder.
    path = trained(data, tmp_path / "run", *languages, "--max-update", 200, "--decoder-attention-heads", 2)
    export = ("convert", "to-hf", path, "--output", tmp_path / "hf", "--tokenizer", tokenizer)
    fairseq("tutel-__main__", *export)
    fairseq("tutel-__main__", "convert", "from-hf", tmp_path / "hf", "--output", tmp_path / "ours")
    ctranslate2.converters.TransformersConverter(str(tmp_path / "hf")).convert(str(tmp_path / "ct2"))
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", intra_threads=1)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = (mt_data.parent / "test.de").read_text().splitlines()
    sources = [theirs.convert_ids_to_tokens(theirs.encode(text)) for text in texts]
    opened = ft.from_checkpoint(tmp_path / "ours", device="cpu")
    for beam in (1, 4):
        found = translator.translate_batch(
            sources, target_prefix=[["__en__"]] * len(texts), beam_size=beam, max_decoding_length=40
        )
        ids = [theirs.convert_tokens_to_ids(each.hypotheses[0][1:]) for each in found]
        ours = opened.translate(
            texts, beam=beam, source_lang="de", target_lang="en", max_len_a=0, max_len_b=40
        )
        assert ours == theirs.batch_decode(ids) and len({*ours}) > 3


@pytest.mark.long
def test_fairseq_s_commands_use_imported_models(tmp_path):
    """fairseq-interactive prints what `translate` returns; fairseq-eval-lm has transformers' loss."""
    pytest.importorskip("transformers")
    from released_models import TEXT, saved

    saved("nllb", tmp_path / "nllb")
    ours = tmp_path / "ours"
    fairseq("tutel-__main__", "convert", "from-hf", tmp_path / "nllb", "--output", ours)
    languages = sorted(path.name.split(".")[1] for path in ours.glob("dict.*.txt"))
    (tmp_path / "lines").write_text("\n".join(TEXT[:3]) + "\n")
    task = (
        "--task", "translation_multi_simple_epoch", "--langs", ",".join(languages), "--lang-pairs",
        "eng_Latn-fra_Latn", "--encoder-langtok", "src", "--decoder-langtok", "-s", "eng_Latn", "-t",
        "fra_Latn",
    )  # fmt: skip
    bpe = ("--bpe", "sentencepiece", "--sentencepiece-model", ours / "sentencepiece.bpe.model")
    opened = ("--user-dir", USER_DIR, "--path", ours / "model.pt", "--beam", 2, "--max-len-b", 6)
    output = fairseq("interactive", ours, *task, *bpe, *opened, stdin=tmp_path / "lines").output
    options = {"beam": 2, "max_len_a": 0, "max_len_b": 6}
    model = ft.from_checkpoint(ours, device="cpu")
    expected = model.translate(TEXT[:3], source_lang="eng_Latn", target_lang="fra_Latn", **options)
    assert re.findall(r"^D-\d+\t\S+\t(.*)$", output, re.M) == expected

    theirs, tokenizer = saved("xglm", tmp_path / "xglm")
    ours = tmp_path / "lm"
    fairseq("tutel-__main__", "convert", "from-hf", tmp_path / "xglm", "--output", ours)
    bpe = ft.from_checkpoint(ours, device="cpu").bpe
    (tmp_path / "text").write_text("".join(f"{bpe.encode(text)}\n" for text in TEXT))
    fairseq(
        "preprocess", "--only-source", "--testpref", tmp_path / "text", "--srcdict", ours / "dict.txt",
        "--destdir", tmp_path / "bin", "--workers", 1,
    )  # fmt: skip
    output = fairseq(
        "eval-lm", tmp_path / "bin", "--user-dir", USER_DIR, "--path", ours / "model.pt", "--gen-subset",
        "test", "--sample-break-mode", "eos", "--batch-size", 2,
    ).output  # fmt: skip
    total = count = 0
    for text in TEXT:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], 2]])
        with torch.no_grad():
            logits = theirs(ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    loss = float(re.search(r"Loss \(base 2\): (\S+),", output)[1])
    assert loss == pytest.approx(total / count / math.log(2), abs=2e-4)


# Commands of fairseq-train for dense models that have the form of a family.
WIDTHS = ("--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2)
FORMS = {
    "xglm": (
        "--task", "language_modeling", "--arch", "transformer_lm", "--activation-fn", "gelu",
        "--share-decoder-input-output-embed", "--decoder-normalize-before",
    ),
    "opt": (
        "--task", "language_modeling", "--arch", "transformer_lm", "--share-decoder-input-output-embed",
        "--decoder-learned-pos", "--no-scale-embedding", "--decoder-normalize-before",
    ),
    "roberta": (
        "--task", "masked_lm", "--arch", "roberta", "--criterion", "masked_lm", "--encoder-layers", 2,
    ),
    "bart": ("--task", "denoising", "--arch", "bart_base", "--encoder-layers", 2, "--decoder-layers", 1),
}  # fmt: skip
DECODER = (
    "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-input-dim", 16, "--decoder-output-dim", 16,
    "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_a_model_that_fairseq_trained_has_equal_logits_in_transformers(name, lm_data, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = DECODER if "lm" in FORMS[name][3] else WIDTHS
    if name == "bart":
        sizes += ("--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2)
    fairseq(
        "train", lm_data, *FORMS[name], *sizes, *TRAINING, "--save-dir", tmp_path / "run",
        "--tokens-per-sample", 32, "--max-update", 10,
    )  # fmt: skip
    path = tmp_path / "run" / "checkpoint_last.pt"
    fairseq("tutel-__main__", "convert", "to-hf", path, "--output", tmp_path / "hf")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.model_type == name
    theirs = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path / "hf").eval()
    ours = ft.from_checkpoint(path, data=lm_data, device="cpu")
    model = (getattr(ours, "models", None) or [ours.model])[0]
    ids = torch.tensor([[0, 5, 9, 7, 8, 5, 2]])
    with torch.no_grad():
        expected = theirs(ids).logits
        found = model(ids, torch.tensor([7]), ids.roll(1))[0] if name == "bart" else model(ids)[0]
        if name == "bart":
            expected = theirs(ids, decoder_input_ids=ids.roll(1)).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
