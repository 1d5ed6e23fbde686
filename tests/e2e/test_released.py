"""Exports a model of fairseq to Hugging Face's format with `convert to-hf`, and imports it again."""

import json
import re

import pytest
import torch
from cli import USER_DIR, fairseq

import fairseq_tutel as ft

sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("transformers")
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES  # noqa: E402

pytestmark = pytest.mark.long
LANGUAGES = FAIRSEQ_LANGUAGE_CODES["m2m100"]
TASK = (
    "--task", "translation_multi_simple_epoch", "--langs", ",".join(LANGUAGES), "--lang-pairs", "de-en",
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
    """Train a dense translation model with M2M100's architecture; return the path of the checkpoint."""
    fairseq("train", data, *TASK, *MODEL, *TRAINING, "--save-dir", folder, *extra)
    return folder / "checkpoint_last.pt"


def translations(data, path, *extra):
    """Return the scores and translations that fairseq-generate prints for the test set."""
    words = (*TASK, "-s", "de", "-t", "en", "--user-dir", USER_DIR, "--path", path, "--beam", 2)
    output = fairseq("generate", data, *words, "--max-len-b", 8, *extra).output
    return re.findall(r"^D-\d+\t(\S+)\t(.*)$", output, re.M)


def encoded(folder, texts):
    """Encode and binarize a parallel text with SentencePiece; return the data and the tokenizer folder."""
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
    languages = [f"__{language}__" for language in LANGUAGES]
    config = {
        "tokenizer_class": "M2M100Tokenizer", "src_lang": "de", "num_madeup_words": 0,
        "additional_special_tokens": languages,
    }  # fmt: skip
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "bin", tokenizer


@pytest.fixture(scope="module")
def exported(mt_data, tmp_path_factory):
    """The data, the checkpoint and the folder of exports of a translation model."""
    folder = tmp_path_factory.mktemp("exported")
    data, tokenizer = encoded(folder, mt_data.parent)
    # CTranslate2 needs the same number of attention heads in the encoder and the decoder.
    path = trained(data, folder / "run", "--max-update", 200, "--decoder-attention-heads", 2)
    export = ("convert", "to-hf", path, "--output", folder / "hf", "--tokenizer", tokenizer)
    assert "M2M100ForConditionalGeneration" in fairseq("tutel-__main__", *export).output
    printed = fairseq(
        "tutel-__main__", "convert", "from-hf", folder / "hf", "--output", folder / "ours"
    ).output
    assert "ours/model.pt: transformer, task translation_multi_simple_epoch" in printed
    return data, path, folder


def test_a_model_exported_to_hugging_face_and_imported_again_translates_equally(exported, tmp_path):
    data, path, folder = exported
    ours = folder / "ours" / "model.pt"
    one, two = (torch.load(file, weights_only=False)["model"] for file in (path, ours))
    weights = [name for name in one if not name.endswith(("version", "_float_tensor"))]
    assert {*weights} <= {*two} and all(torch.equal(one[name], two[name]) for name in weights)
    expected = translations(data, path)
    assert translations(data, ours) == expected and len({text for _, text in expected}) > 3
    fairseq(
        "train", data, *TASK, *MODEL, *TRAINING, "--save-dir", tmp_path / "tuned", "--max-update", 1,
        "--decoder-attention-heads", 2, "--finetune-from-model", ours,
    )  # fmt: skip


def test_ctranslate2_translates_with_an_exported_model_as_fairseq_does(exported, mt_data):
    """The translations are equal with greedy search and with beam search."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    transformers = pytest.importorskip("transformers")
    tmp_path = exported[2]
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
