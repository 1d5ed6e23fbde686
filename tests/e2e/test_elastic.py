"""With --moe-micro-batches, a run that loses and gains ranks gives the model of a run on one rank."""

import re
from pathlib import Path

import pytest
import torch
from cli import fairseq
from equality import same_training
from launchers import Cluster
from models import lm_args

PLACES = str(Path(__file__).parents[1] / "faults" / "faulty_places")
SLOW = str(Path(__file__).parent / "slow_user_dir")
SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5)
# Dropout and gate noise draw the same random numbers on any number of ranks.
DROPOUT = ("--dropout", 0.1, "--moe-gate-noise", 1)
SAVES = ("--save-interval-updates", 2, "--disable-validation")


def _words(data, folder, size, *extra, updates):
    return lm_args(data, folder, *SGD, *SAVES, "--moe-micro-batches", size, *extra, updates=updates)


def test_a_run_that_moves_from_three_ranks_to_one_equals_a_run_on_one_rank(lm_data, tmp_path):
    """Three ranks share four micro-batches, so two ranks run an empty micro-batch in every update."""
    one, three = tmp_path / "one", tmp_path / "three"
    # An epoch has four updates; the last update has fewer micro-batches.
    kind = ("--batch-size", 16, "--moe-balance-bias", "--moe-capacity-factor", 1, *DROPOUT)
    kind = (*kind, "--moe-drop-policy", "rts")
    fairseq("train", *_words(lm_data, one, 4, *kind, updates=7))
    fairseq("train", *_words(lm_data, three, 4, *kind, updates=5), ranks=3)
    run = fairseq("train", *_words(lm_data, three, 4, *kind, updates=7))
    assert "(epoch 2 @ 5 updates)" in run.output
    same_training(one, three)
    saved = torch.load(three / "checkpoint_last.pt", weights_only=False)
    assert saved["cfg"]["task"]["moe_micro_batches"] == 4


@pytest.mark.long
def test_training_continues_after_one_node_is_lost_and_another_joins(lm_data, tmp_path):
    """torch's rendezvous store runs outside of the nodes, so the run survives the loss of any node."""
    lost = 0
    # With seed 2, a token has two almost equal gate logits, so rounding could change the chosen expert.
    seed = ("--seed", 4)
    words = _words(lm_data, tmp_path / "save", 4, "--user-dir", SLOW, *seed, updates=60)
    cluster = Cluster(tmp_path, words)
    last = tmp_path / "save" / "checkpoint_last.pt"

    def updates():
        return max([0, *map(int, re.findall(r'"num_updates": "(\d+)"', cluster.log()))])

    try:
        cluster.start(0)
        cluster.start(1)
        cluster.wait_until(last.exists)
        cluster.wait_until(lambda: updates() >= 6)
        cluster.lose(lost)
        cluster.wait_until(lambda: "training on 1 devices" in cluster.log())
        before = updates()
        cluster.wait_until(lambda: updates() > before + 4)
        cluster.start(lost)
        cluster.wait_until(lambda: cluster.log().count("training on 2 devices") >= 2)
        cluster.wait_until(cluster.has_ended)
    finally:
        cluster.close()
    # When a node joins, torchrun sends SIGTERM to the ranks. After SIGTERM, the ranks save, so training
    # repeats no update.
    saved = re.findall(r"a rank received a signal; update (\d+) is saved in", cluster.log())
    assert saved and f"@ {saved[-1]} updates)" in cluster.log()
    fairseq("train", *_words(lm_data, tmp_path / "one", 4, *seed, updates=60))
    assert len(cluster.agents) == 2 and updates() == 60
    same_training(tmp_path / "one", tmp_path / "save")
