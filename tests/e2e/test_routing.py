"""Tests of routing in fairseq's commands: random choices, incremental decoding and custom gates."""

import itertools
import re

import pytest
import torch
from cli import ROOT, USER_DIR, fairseq, refused
from equality import facts_of, same_bits
from models import lm_args, mt_args
from option_values import draws, settings_of

from fairseq_tutel.moe.config import LAYER

RANDOM = {
    "noise": (
        "--dropout", 0.1, "--attention-dropout", 0.1, "--activation-dropout", 0.1, "--update-freq", 2,
        "--moe-drop-policy", "rts", "--moe-capacity-factor", 0.5, "--moe-gate-noise", 1.0,
        "--moe-input-jitter", 0.1, "--moe-input-dropout", 0.1, "--moe-gate-type", "cosine",
        "--moe-gate-projection-dim", 8, "--moe-gate-temperature", 0.2,
        "--moe-second-expert-policy", "random", "--moe-normalize-gate", "after",
        "--moe-balance-bias", "--moe-balance-loss", "load_importance:1,gshard_global:1",
    ),
    "sampling": ("--moe-rsample", "--moe-capacity-factor", 0.5, "--checkpoint-activations"),
    "nllb": (
        "--moe-capacity-factor", 0.5, "--moe-eom", 0.2, "--moe-fom", 0.1, "--moe-cmr",
        "--cmr-gate-drop", 0.2, "--cmr-gate-loss-wt", 0.5, "--cmr-gate-loss-p", 0.3,
        "--moe-local-drop", 0.71, "--moe-second-expert-policy", "sampling",
    ),
}  # fmt: skip


def _load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


@pytest.mark.parametrize("kind, ranks", [("noise", 2), ("sampling", 1), ("nllb", 1)])
def test_random_routing_choices_continue_bit_for_bit_after_a_resume(kind, ranks, lm_data, tmp_path):
    def train(folder, updates):
        words = lm_args(lm_data, folder, *RANDOM[kind], "--disable-validation", updates=updates)
        return fairseq("train", *words, ranks=ranks)

    run = train(tmp_path / "a", 3)
    train(tmp_path / "b", 1)
    assert "(epoch 1 @ 1 updates)" in train(tmp_path / "b", 3).output
    a, b = _load(tmp_path / "a"), _load(tmp_path / "b")
    same_bits(a["model"], b["model"])
    same_bits(a["last_optimizer_state"]["state"], b["last_optimizer_state"]["state"])
    assert facts_of(a) == facts_of(b)
    assert float(run.stats("train_inner")[0]["overflow_expert1"]) > 0
    if kind == "noise":
        steps = a["model"]["decoder.layers.0.fc1.balance_bias.bias"] / 0.001
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
        assert 0 < steps.abs().max() <= 3  # an update changes a balance bias by 0.001
    if kind == "nllb":
        assert a["model"]["decoder.layers.1.fc1.beside.cmr_gate.weight"].shape == (1, 16)
        for record in run.stats("train_inner"):
            distance = abs(float(record["moe_cmr_gate"]) - 0.3)
            assert float(record["cmr_gate_loss"]) == pytest.approx(distance, abs=0.02)


def test_every_option_that_draws_random_numbers_is_in_the_resume_test():
    resumed = {pair for flags in RANDOM.values() for pair in itertools.pairwise(("", *flags, ""))}
    for name, item in LAYER.items():
        for settings in settings_of(name) if item.of == "model" else ():
            if draws(settings):
                word = settings[name] if item.choices else None
                assert any(flag == item.flag and word in (None, value) for flag, value in resumed), settings


DECODED = (
    "--moe-expert-groups", 2, "--moe-top-k", 2, "--moe-balance-bias", "--moe-shared-experts", 1,
    "--moe-score-function", "sigmoid", "--moe-prescore", "--moe-pregate", 1,
    "--moe-pregate-sides", "decoder",
)  # fmt: skip


def test_incremental_decoding_gives_the_scores_of_one_forward_pass(mt_data, tmp_path):
    fairseq("train", *mt_args(mt_data, tmp_path, *DECODED, "--disable-validation", updates=2))
    words = (mt_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--beam", 1)
    words += ("--gen-subset", "valid", "--num-workers", 0, "--required-batch-size-multiple", 1)
    scores = {}
    for extra in (("--prefix-size", 99), ("--score-reference",)):
        # --prefix-size scores each reference word by word; --score-reference uses one forward pass.
        run = fairseq("generate", *words, *extra)
        found = re.findall(r"^P-(\d+)\t(.*)$", run.output, re.M)
        scores[extra[0]] = {int(i): [float(x) for x in row.split()] for i, row in found}
    assert len(scores["--prefix-size"]) == 21
    for i, row in scores["--score-reference"].items():
        got = scores["--prefix-size"][i]
        assert got == pytest.approx(row, abs=2e-3), i


OWN = ("--moe-gate-type", "own_user_dir.CalmGate", "--moe-expert-type", "own_user_dir.TanhExpert")


def test_a_model_with_a_custom_gate_and_expert_trains_and_is_evaluated(lm_data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    fairseq("train", *lm_args(lm_data, tmp_path, *OWN, updates=1), ranks=2)
    assert _load(tmp_path)["model"]["decoder.layers.0.fc1.experts.0__weight"].shape == (4, 32, 16)
    words = (lm_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt")
    words = (*words, "--gen-subset", "valid", "--tokens-per-sample", 16)
    assert "checkpoint_last.pt has the gate_type (--moe-gate-type) own" in refused("eval-lm", *words)
    named = "{'moe_gate_type': 'own_user_dir.CalmGate', 'moe_expert_type': 'own_user_dir.TanhExpert'}"
    run = fairseq("eval-lm", *words, "--model-overrides", named)
    assert "Perplexity" in run.output
