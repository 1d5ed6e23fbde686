"""Routing through the command line: every gate, choice, policy, loss and expert beside experts."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from cli import ROOT, USER_DIR, fairseq, refused
from equality import same_bits
from models import lm_args, mt_args
from option_values import draws, settings_of

from fairseq_tutel.moe.config import LAYER
from fairseq_tutel.plugin.feed_forward import Context

RANDOM = {
    "noise": (
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
        "--moe-local-drop", 0.71, "--record-a2a-perf-stats", "--moe-second-expert-policy", "sampling",
    ),
}  # fmt: skip


def _load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


# tests/e2e/test_determinism.py has most of "noise", too.
@pytest.mark.parametrize("kind", [pytest.param("noise", marks=pytest.mark.long), "sampling", "nllb"])
def test_exploration_goes_on_bit_for_bit_after_a_resume(kind, lm_data, tmp_path):
    ranks = {"noise": 2, "sampling": 1, "nllb": 2}[kind]

    def train(folder, updates):
        words = lm_args(lm_data, folder, *RANDOM[kind], updates=updates)
        return fairseq("train", *words, ranks=ranks)

    run = train(tmp_path / "a", 4)
    train(tmp_path / "b", 2)
    train(tmp_path / "b", 4)
    a, b = _load(tmp_path / "a"), _load(tmp_path / "b")
    same_bits(a["model"], b["model"])
    assert float(run.stats("train_inner")[0]["overflow_expert1"]) > 0
    if kind == "noise":
        assert a["model"]["decoder.layers.0.fc1.gate.directions"].shape == (4, 8)
        steps = a["model"]["decoder.layers.0.fc1.balance_bias.bias"] / 0.001
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
        assert 0 < steps.abs().max() <= 4  # one step an update
    if kind == "nllb":
        assert a["model"]["decoder.layers.1.fc1.beside.cmr_gate.weight"].shape == (1, 16)
        context, sends = Context(True, local_drop=0.71, seed=1), []
        for update, record in enumerate(run.stats("train_inner")):
            distance = abs(float(record["moe_cmr_gate"]) - 0.3)
            # The tokens of all layers have one mean; the log has a mean for each micro-batch.
            assert float(record["cmr_gate_loss"]) == pytest.approx(distance, abs=0.02)
            context.begin_step(update=update)
            names = [f"decoder.layers.{i}.fc1" for i in range(2)]
            layers = [SimpleNamespace(name=name, training=True, calls=True) for name in names]
            sends.append(not all(map(context.keeps_rows, layers)))
            # The time of a forward pass and of the backward pass before it.
            assert (float(record["all_to_all_cpu_time_ms"]) > 0) == any(sends[-2:])
        assert sends[-2:] == [False, False] and any(sends)
        words = (lm_data, "--user-dir", USER_DIR, "--path", tmp_path / "b" / "checkpoint_last.pt")
        evaluated = fairseq("eval-lm", *words, "--gen-subset", "valid", "--tokens-per-sample", 16)
        assert "Perplexity" in evaluated.output


def test_every_option_that_draws_random_numbers_is_resumed():
    resumed = {pair for flags in RANDOM.values() for pair in itertools.pairwise(("", *flags, ""))}
    for name, item in LAYER.items():
        for settings in settings_of(name) if item.of == "model" else ():
            if draws(settings):
                word = settings[name] if item.choices else None
                assert any(flag == item.flag and word in (None, value) for flag, value in resumed), settings


@pytest.mark.parametrize("policy", ["bpr", "probability"])
def test_a_drop_policy_trains_and_drops(policy, lm_data, tmp_path):
    flags = ("--moe-drop-policy", policy, "--moe-capacity-factor", 0.5, "--no-save")
    records = fairseq("train", *lm_args(lm_data, tmp_path, *flags)).stats("train_inner")
    assert float(records[-1]["overflow_expert1"]) > 0
    # BPR gives second choices a place only where first ones left one; probability weighs them alike.
    assert float(records[-1]["overflow_expert2"]) > float(records[-1]["overflow_expert1"])


def test_capacity_has_a_floor_a_grain_and_a_rule_for_evaluation(lm_data, tmp_path):
    """Few tokens: with 64 of them, 4 experts and f = 0.1 there are 4 places; at least 32 are asked for."""
    drops = {}
    for name, flags in {
        "bare": (),
        "floor": ("--moe-min-capacity", 32),
        "grain": ("--moe-capacity-multiple", 32),
        "as in training": ("--moe-eval-capacity-token-fraction", -1),
    }.items():
        flags = ("--moe-capacity-factor", 0.1, "--no-save", *flags)
        run = fairseq("train", *lm_args(lm_data, tmp_path, *flags, updates=2))
        in_training = float(run.stats("train_inner")[0]["overflow_expert1"])
        drops[name] = in_training, float(run.stats("valid")[-1]["valid_overflow_expert1"])
    assert drops["bare"][0] > 50
    assert drops["floor"][0] < 10 and drops["grain"][0] < 10
    assert [name for name, (_, in_evaluation) in drops.items() if in_evaluation] == ["as in training"]


def test_choices_after_the_first_are_taken_by_chance_in_training_alone(lm_data, tmp_path):
    flags = ("--moe-second-expert-policy", "random", "--no-save")
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags))
    # Without all second choices, the shares of the busiest and idlest experts sum to less.
    first, last = run.stats("train_inner")[0], run.stats("valid")[-1]
    assert float(first["expert2_balance_top"]) < float(first["expert1_balance_top"])
    assert float(last["valid_expert2_balance_top"]) > float(first["expert2_balance_top"])


def test_experts_beside_experts_are_parts_of_the_model(lm_data, tmp_path):
    flags = ("--moe-shared-experts", 2, "--moe-residual", "--moe-expert-type", "glu")
    fairseq("train", *lm_args(lm_data, tmp_path, *flags), ranks=2)
    model = _load(tmp_path)["model"]
    prefix = "decoder.layers.1.fc1.beside"
    assert model[f"{prefix}.shared.fc3.weight"].shape == (64, 16)
    assert model[f"{prefix}.dense.fc1.weight"].shape == (32, 16)
    assert model[f"{prefix}.mix.weight"].shape == (2, 16)
    words = (lm_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt")
    run = fairseq("eval-lm", *words, "--gen-subset", "valid", "--tokens-per-sample", 16)
    assert "Perplexity" in run.output


def test_many_small_experts_train(lm_data, tmp_path):
    flags = (
        "--moe-expert-count", 128, "--moe-top-k", 8, "--moe-expert-ffn-dim", 4, "--moe-shared-experts", 1,
        "--moe-score-function", "sigmoid", "--moe-balance-bias",
        "--moe-balance-loss", "gshard_sequence:0.1",
        "--moe-expert-groups", 8, "--moe-groups-per-token", 4, "--moe-routed-scaling-factor", 2.5,
    )  # fmt: skip
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags, updates=14), ranks=2)
    losses = [float(record["loss"]) for record in run.stats("train_inner")]
    assert losses[-1] < losses[0] - 0.5
    assert "128 experts, top-8, hidden 4" in run.output
    assert _load(tmp_path)["model"]["decoder.layers.0.fc1.experts.fc1_weight"].shape == (128, 4, 16)


def test_experts_choose_in_an_encoder_and_a_decoder_is_warned_about(mt_data, tmp_path):
    flags = ("--moe-choice", "experts", "--no-save")
    run = fairseq("train", *mt_args(mt_data, tmp_path, *flags, "--decoder-moe-freq", 0), ranks=2)
    record = run.stats("train_inner")[-1]
    load = record["moe_load_encoder_1"]
    assert load == [1.0] * 4  # every expert takes the same number
    assert "depend on later tokens" not in run.output
    run = fairseq("train", *mt_args(mt_data, tmp_path, *flags, updates=1))
    assert "depend on later tokens" in run.output


DECODING = {
    "hash": ("--moe-gate-type", "hash"),
    "groups-bias-shared": (
        "--moe-expert-groups", 2, "--moe-top-k", 2, "--moe-balance-bias", "--moe-shared-experts", 1,
        "--moe-score-function", "sigmoid", "--moe-prescore",
        "--moe-pregate", 1, "--moe-pregate-sides", "decoder",
    ),
    "several-gates": (
        "--moe-gate-type", "cosine,linear", "--moe-gate-projection-dim", 8, "--moe-gate-index", 1,
        "--moe-cmr", "--moe-eom", 0.2, "--moe-fom", 0.1, "--moe-second-expert-policy", "sampling",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["hash", "groups-bias-shared", pytest.param("several-gates", marks=pytest.mark.long)]
)
def test_incremental_decoding_scores_as_a_forward_over_the_sentence(name, mt_data, tmp_path):
    fairseq("train", *mt_args(mt_data, tmp_path, *DECODING[name], updates=2), ranks=2)
    words = (mt_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--beam", 1)
    words += ("--gen-subset", "valid", "--num-workers", 0, "--required-batch-size-multiple", 1)
    scores = {}
    for extra in (("--prefix-size", 99), ("--score-reference",)):
        # The reference as a prefix is scored word by word, on its own all at once.
        run = fairseq("generate", *words, *extra)
        found = re.findall(r"^P-(\d+)\t(.*)$", run.output, re.M)
        scores[extra[0]] = {int(i): [float(x) for x in row.split()] for i, row in found}
    assert len(scores["--prefix-size"]) == 21
    for i, row in scores["--score-reference"].items():
        got = scores["--prefix-size"][i]
        assert got == pytest.approx(row, abs=2e-3), (name, i)


OWN = ("--moe-gate-type", "own_user_dir.CalmGate", "--moe-expert-type", "own_user_dir.TanhExpert")


def test_a_gate_and_an_expert_of_one_s_own_train_and_are_opened_again(lm_data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    runs = {}
    for ranks in (1, 2):
        words = ("--update-freq", 2 // ranks, "--optimizer", "moe_sgd", "--lr", 0.5)
        folder = tmp_path / str(ranks)
        fairseq("train", *lm_args(lm_data, folder, *OWN, *words), ranks=ranks)
        runs[ranks] = _load(folder)["model"]
    assert runs[1]["decoder.layers.0.fc1.experts.0__weight"].shape == (4, 32, 16)
    for name, tensor in runs[1].items():
        torch.testing.assert_close(runs[2][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    fairseq("train", *lm_args(lm_data, tmp_path / "2", *OWN, *words, updates=8))
    words = (lm_data, "--user-dir", USER_DIR, "--path", tmp_path / "2" / "checkpoint_last.pt")
    words = (*words, "--gen-subset", "valid", "--tokens-per-sample", 16)
    assert "checkpoint_last.pt has the gate_type (--moe-gate-type) own" in refused("eval-lm", *words)
    named = "{'moe_gate_type': 'own_user_dir.CalmGate', 'moe_expert_type': 'own_user_dir.TanhExpert'}"
    run = fairseq("eval-lm", *words, "--model-overrides", named)
    assert "Perplexity" in run.output


def test_a_bias_can_be_switched_on_and_what_changed_is_said(lm_data, tmp_path):
    fairseq("train", *lm_args(lm_data, tmp_path, "--moe-score-function", "sigmoid", updates=3))
    flags = ("--moe-balance-bias", "--moe-balance-loss", "none")
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags, updates=5))
    assert "--moe-score-function: 'sigmoid' (saved) → 'softmax' (given)" in run.output
    assert "--moe-balance-loss: 'gshard:1' (saved) → 'none' (given)" in run.output
    bias = _load(tmp_path)["model"]["decoder.layers.0.fc1.balance_bias.bias"]
    assert 0 < bias.abs().max() <= 0.0021  # two updates
    output = refused("train", *lm_args(lm_data, tmp_path, "--moe-residual", updates=7))
    assert "--moe-residual: False (saved) → True (given)" in output
