"""The same seed on the same ranks: the same bits, also over a resume in the middle of an epoch."""

import pytest
import torch
from cli import fairseq
from equality import facts_of, same_bits
from models import lm_args

RANDOM = (
    "--dropout", 0.1, "--attention-dropout", 0.1, "--activation-dropout", 0.1,
    "--moe-gate-noise", 1.0, "--moe-input-jitter", 0.1, "--moe-input-dropout", 0.1,
    "--moe-drop-policy", "rts", "--moe-capacity-factor", 0.5, "--moe-second-expert-policy", "random",
    "--checkpoint-activations", "--update-freq", 2,
)  # fmt: skip
SLICED = (
    "--moe-expert-count", 2, "--moe-expert-parallel-size", 4, "--moe-a2a-ffn-overlap-degree", 2,
    "--moe-a2a-algorithm", "2dh", "--moe-local-size", 2,
)  # fmt: skip
CASES = [
    pytest.param(1, (), id="1 rank", marks=pytest.mark.long),
    pytest.param(2, (), id="2 ranks"),
    pytest.param(4, SLICED, id="4 ranks", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("ranks", "flags"), CASES)
def test_a_training_and_one_that_went_on_are_the_same_bit_for_bit(ranks, flags, lm_data, tmp_path):
    def train(name, updates, *more):
        words = lm_args(lm_data, tmp_path / name, *RANDOM, *flags, *more, updates=updates)
        return fairseq("train", *words, ranks=ranks)

    run = train("once", 4)
    train("went on", 2)
    assert "(epoch 1 @ 2 updates)" in train("went on", 4).output
    once, went_on = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)
        for name in ("once", "went on")
    )
    same_bits(once["model"], went_on["model"])
    same_bits(once["last_optimizer_state"]["state"], went_on["last_optimizer_state"]["state"])
    assert facts_of(once) == facts_of(went_on)
    assert float(run.stats("train_inner")[0]["overflow_expert1"]) > 0  # at random
