"""multilingual_translation with experts: each pair has a sample of a batch, and a step of the criterion.

Covered: a shared encoder, decoders of their own; ranks that share experts, with ZeRO, a capacity, dropping
by priority, unequal batches and a resume are one training; the load of each pair's layers; validation.
"""

import pytest
import torch
from cli import USER_DIR, fairseq
from corpora import translation
from equality import facts_of, same_weights
from models import mt_args

PAIRS = ("--task", "multilingual_translation", "--lang-pairs", "de-en,en-de")
MODEL = (
    *PAIRS, "--arch", "moe_multilingual_transformer", "--share-encoders", "--moe-capacity-factor", 1,
    "--moe-batch-prioritized-routing", "--optimizer", "moe_sgd", "--lr", 0.1, "--disable-validation",
)  # fmt: skip
SHARED = ("--moe-expert-parallel-size", 2, "--moe-zero-stage", 2)


@pytest.mark.long
def test_a_multilingual_training_is_the_same_on_two_ranks_and_resumed(tmp_path):
    data = translation(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    run = fairseq("train", *mt_args(data, one, *MODEL, "--update-freq", 2))
    fairseq("train", *mt_args(data, two, *MODEL, *SHARED, updates=2), ranks=2)
    fairseq("train", *mt_args(data, two, *MODEL, *SHARED), ranks=2)
    expected, found = (
        torch.load(save / "checkpoint_last.pt", weights_only=False) for save in (one, two)
    )
    assert facts_of(found) == pytest.approx(facts_of(expected), rel=1e-5, abs=1e-6)
    same_weights(expected["model"], found["model"], adam=False)

    first = run.stats("train_inner")[0]
    decoders = [first[f"moe_load_{pair}_decoder_0"] for pair in ("de-en", "en-de")]
    assert decoders[0] != decoders[1]  # each is of its own layer
    assert [sum(load) for load in decoders] == pytest.approx([4, 4], abs=0.01)
    opened = ("--user-dir", USER_DIR, "--path", two / "checkpoint_last.pt", "--max-tokens", 120)
    validated = fairseq("validate", data, *PAIRS, *opened, "--log-format", "json").output
    assert '"valid_moe_load_en-de_decoder_1"' in validated
