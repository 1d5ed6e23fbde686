"""A custom fairseq model with `ft.moe_layer` trains, saves and resumes like the plugin's models."""

import re
from pathlib import Path

import pytest
from cli import fairseq, refused
from models import dense_lm_args

OWN_DIR = str(Path(__file__).parent / "own_layers_user_dir")


def train(data, save_dir, *extra, updates, ranks=1):
    words = ("--arch", "own_lm", "--user-dir", OWN_DIR, "--decoder-layers", 4, "--moe-micro-batches", 6)
    run = fairseq("train", *dense_lm_args(data, save_dir, *words, *extra, updates=updates), ranks=ranks)
    return [(float(each["loss"]), float(each["gnorm"])) for each in run.stats("train_inner")]


def evaluated(data, save_dir):
    path = ("--path", save_dir / "checkpoint_last.pt", "--user-dir", OWN_DIR, "--tokens-per-sample", 16)
    run = fairseq("eval-lm", data, *path, "--batch-size", 4)
    return float(run.output.rpartition("Loss (base 2): ")[2].split(",")[0])


@pytest.fixture(scope="module")
def alone(lm_data, tmp_path_factory):
    """The logged losses and gradient norms of a run on one rank, and the model's evaluation loss."""
    folder = tmp_path_factory.mktemp("alone")
    return train(lm_data, folder, updates=6), evaluated(lm_data, folder)


def test_a_custom_model_moves_from_two_ranks_to_three_and_is_evaluated_on_one(alone, lm_data, tmp_path):
    words = ("--moe-zero-stage", 2, "--moe-checkpoint", "sharded", "--store-ema")
    begun = train(lm_data, tmp_path, *words, updates=3, ranks=2)
    resumed = train(lm_data, tmp_path, *words, updates=6, ranks=3)
    for own, expected in zip([*begun, *resumed], alone[0], strict=True):
        assert own == pytest.approx(expected, abs=2e-3)
    assert evaluated(lm_data, tmp_path) == pytest.approx(alone[1], abs=2e-3)


def test_a_custom_model_refuses_a_checkpoint_with_another_number_of_experts(lm_data, tmp_path):
    train(lm_data, tmp_path, updates=1)
    env = {"EXPERTS": "4"}
    words = ("--arch", "own_lm", "--user-dir", OWN_DIR, "--decoder-layers", 4)
    output = refused("train", *dense_lm_args(lm_data, tmp_path, *words, updates=2), ranks=2, env=env)
    assert re.search(r"error: \S+checkpoint_last.pt does not fit this model .*--moe-expert-count", output)
