"""Gates, exploration and drop policies through the command line.

Covered: everything that draws random numbers, on two ranks, the same bits after a resume; every drop
policy trains and drops; hydra.
"""

import pytest
import torch
from cli import ROOT, fairseq
from equality import same_bits
from models import lm_args

RANDOM = (
    "--moe-drop-policy", "rts", "--moe-capacity-factor", 0.5, "--moe-gate-noise", 1.0,
    "--moe-input-jitter", 0.1, "--moe-input-dropout", 0.1, "--moe-gate-type", "cosine",
    "--moe-gate-projection-dim", 8, "--moe-gate-temperature", 0.2,
)  # fmt: skip


def _load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


def test_exploration_goes_on_bit_for_bit_after_a_resume_on_two_ranks(lm_data, tmp_path):
    def train(folder, updates):
        return fairseq("train", *lm_args(lm_data, folder, *RANDOM, updates=updates), ranks=2)

    run = train(tmp_path / "a", 6)
    train(tmp_path / "b", 3)
    train(tmp_path / "b", 6)
    a, b = _load(tmp_path / "a"), _load(tmp_path / "b")
    same_bits(a["model"], b["model"])
    assert float(run.stats("train_inner")[0]["overflow_expert1"]) > 0
    assert a["model"]["decoder.layers.0.fc1.gate.directions"].shape == (4, 8)


@pytest.mark.parametrize("policy", ["bpr", "probability"])
def test_a_drop_policy_trains_and_drops(policy, lm_data, tmp_path):
    flags = ("--moe-drop-policy", policy, "--moe-capacity-factor", 0.5, "--no-save")
    records = fairseq("train", *lm_args(lm_data, tmp_path, *flags)).stats("train_inner")
    assert float(records[-1]["overflow_expert1"]) > 0
    # BPR gives second choices a place only where first ones left one; probability weighs them alike.
    assert float(records[-1]["overflow_expert2"]) > float(records[-1]["overflow_expert1"])


def test_gate_and_policy_are_keys_of_hydra(lm_data, tmp_path):
    fairseq(
        "hydra-train", "--config-dir", "configs/hydra", "--config-name", "tiny_lm",
        f"task.data={lm_data}", f"checkpoint.save_dir={tmp_path}", "model.decoder_layers=1",
        "model.moe_capacity_factor=0.5", "+model.moe_drop_policy=bpr", "+model.moe_gate_type=cosine",
        "+model.moe_gate_projection_dim=5", "+model.moe_gate_noise=0.5", "+model.moe_input_jitter=0.1",
        "+model.moe_balance_loss='gshard_all:1,z:0.1'", "optimization.max_update=1",
        "dataset.required_batch_size_multiple=1", cwd=ROOT, env={"PWD": str(ROOT)},
    )  # fmt: skip
    assert _load(tmp_path)["model"]["decoder.layers.0.fc1.gate.directions"].shape == (8, 5)
