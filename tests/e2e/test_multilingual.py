"""multilingual_translation with experts: a batch has one sample, and one criterion call, per pair."""

import re

import pytest
from cli import USER_DIR, fairseq
from corpora import translation
from equality import same_training
from models import mt_args

import fairseq_tutel as ft

PAIRS = ("--task", "multilingual_translation", "--lang-pairs", "de-en,en-de")
MODEL = (
    *PAIRS, "--arch", "moe_multilingual_transformer", "--share-encoders", "--moe-capacity-factor", 1,
    "--moe-batch-prioritized-routing", "--optimizer", "moe_sgd", "--lr", 0.1, "--disable-validation",
)  # fmt: skip
BOTH = (
    "--task", "moe_translation_multi_simple_epoch", "--langs", "de,en", "--lang-pairs", "de-en,en-de",
)  # fmt: skip
SIMPLE = (
    *BOTH, "--encoder-langtok", "src", "--decoder-langtok", "--sampling-method", "temperature",
    "--sampling-temperature", 2, "--virtual-epoch-size", 24,
)  # fmt: skip
DRAWN = (
    "--optimizer", "moe_sgd", "--lr", 0.1, "--batch-size", 4, "--disable-validation", "--dropout", 0,
    "--encoder-layers", 1, "--decoder-layers", 1, "--max-tokens", 512,
)  # fmt: skip
SHARED = ("--moe-expert-parallel-size", 2, "--moe-zero-stage", 2)


@pytest.mark.long
def test_a_multilingual_training_is_the_same_on_two_ranks_and_resumed(tmp_path):
    data = translation(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    run = fairseq("train", *mt_args(data, one, *MODEL, "--update-freq", 2))
    fairseq("train", *mt_args(data, two, *MODEL, *SHARED, updates=2), ranks=2)
    fairseq("train", *mt_args(data, two, *MODEL, *SHARED), ranks=2)
    same_training(one, two)

    first = run.stats("train_inner")[0]
    decoders = [first[f"moe_load_{pair}_decoder_0"] for pair in ("de-en", "en-de")]
    assert decoders[0] != decoders[1]  # each list belongs to another layer
    assert [sum(load) for load in decoders] == pytest.approx([4, 4], abs=0.01)
    opened = ("--user-dir", USER_DIR, "--path", two / "checkpoint_last.pt", "--max-tokens", 120)
    validated = fairseq("validate", data, *PAIRS, *opened, "--log-format", "json").output
    assert '"valid_moe_load_en-de_decoder_1"' in validated


@pytest.mark.long
def test_a_run_resumed_in_a_later_epoch_samples_the_same_sentences(tmp_path):
    data = translation(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    command, in_second = (*SIMPLE, *DRAWN), 4
    fairseq("train", *mt_args(data, one, *command, "--update-freq", 2, updates=in_second + 2))
    shared = (*command, *SHARED[:2])
    fairseq("train", *mt_args(data, two, *shared, updates=in_second), ranks=2)
    resumed = fairseq("train", *mt_args(data, two, *shared, updates=in_second + 2), ranks=2)
    assert resumed.stats("train_inner")[0]["epoch"] == 2
    same_training(one, two)

    opened = ("--user-dir", USER_DIR, "--path", two / "checkpoint_last.pt", "--gen-subset", "test")
    of_pair = ("-s", "de", "-t", "en", "--encoder-langtok", "src", "--decoder-langtok")
    output = fairseq("generate", data, *BOTH, *of_pair, *opened, "--batch-size", 1).output
    model = ft.from_checkpoint(two, source_lang="de", target_lang="en")
    of = {kind: dict(re.findall(rf"^{kind}-(\d+)\t(.*)$", output, re.M)) for kind in "SD"}
    texts = {i: text.partition(" ")[2] for i, text in of["S"].items()}  # without __de__
    assert {i: model.translate(texts[i]) for i in ("0", "1")} == {
        i: of["D"][i].partition("\t")[2] for i in ("0", "1")
    }
    model = ft.from_checkpoint(two)
    assert (
        model.translate(texts["0"], source_lang="de", target_lang="en") == of["D"]["0"].partition("\t")[2]
    )
    with pytest.raises(ValueError, match="source_lang is 'fr', which is not a language of this model"):
        model.translate(texts["0"], source_lang="fr")
