"""Training with ZeRO, optimizer offload or expert parallelism gives the model of one process."""

import shlex

import pytest
import torch
from cli import ROOT, USER_DIR, fairseq, tail
from equality import facts_of, same_bits, same_weights
from models import lm_args

MICRO_BATCHES = 4
SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5)
ZERO_2 = ("--moe-zero-stage", 2)
OFFLOAD = ("--moe-offload-optimizer",)


def _load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


def _train(data, folder, *flags, ranks=1, updates=4):
    """Train a language model with four micro-batches per update on the given number of ranks."""
    args = lm_args(data, folder, "--update-freq", MICRO_BATCHES // ranks, *flags, updates=updates)
    return fairseq("train", *args, ranks=ranks)


def _same_training(expected, found, adam):
    assert facts_of(found) == pytest.approx(facts_of(expected), rel=1e-5, abs=1e-6)
    same_weights(expected["model"], found["model"], adam)


@pytest.mark.long
def test_zero_in_bf16_gives_the_master_weights_of_a_run_without_zero(lm_data, tmp_path):
    # Without clipping, Adam and gradient accumulation, runs with and without ZeRO add in the same order.
    steps = (*SGD, "--bf16", "--clip-norm", 0, "--update-freq", 1)
    flags = (*steps, "--moe-expert-parallel-size", 2)
    for folder, more in (("plain", ()), ("zero", ZERO_2)):
        _train(lm_data, tmp_path / folder, *flags, *more, ranks=2, updates=3)
    expected, found = _load(tmp_path / "plain"), _load(tmp_path / "zero")
    assert all(torch.equal(w, w.bfloat16().float()) for w in found["model"].values())
    # ZeRO must not change a bit of the weights or of the fp32 master weights.
    same_bits(expected["model"], found["model"])
    same_bits(expected["last_optimizer_state"]["state"], found["last_optimizer_state"]["state"])
    # A run with ZeRO resumes from a checkpoint of a run without ZeRO, and the other way round.
    straight = tmp_path / "straight"
    _train(lm_data, straight, *flags, ranks=2, updates=5)
    _train(lm_data, tmp_path / "plain", *flags, *ZERO_2, *OFFLOAD, ranks=2, updates=5)
    same_bits(_load(straight)["model"], _load(tmp_path / "plain")["model"])
    one = (*steps, "--lr", 0.0, "--reset-lr-scheduler")
    _train(lm_data, tmp_path / "zero", *one, updates=4)
    state = _load(tmp_path / "zero")["last_optimizer_state"]["state"]
    for index, before in found["last_optimizer_state"]["state"].items():
        assert torch.equal(state[index]["fp32_master"], before["fp32_master"])


def _recipe(form):
    """Return the training arguments of a recipe, adapted to the small corpus of the tests."""
    words = shlex.split((ROOT / "configs" / "args" / f"parallel_{form}.args").read_text())
    words[words.index("--user-dir") + 1] = USER_DIR
    return [
        *words, "--tokens-per-sample", 16, "--required-batch-size-multiple", 1, "--dropout", 0,
        "--warmup-updates", 1, "--log-interval", 1, "--max-update", 3, "--cpu",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one_process(lm_data, tmp_path_factory):
    """Return a function that trains the model of a recipe in one process and returns the checkpoint."""
    files = {}

    def of(form):
        words = _recipe(form)
        count = words[words.index("--moe-expert-count") + 1]
        if count not in files:
            folder = tmp_path_factory.mktemp("one")
            alone = ("--moe-expert-parallel-size", 1, "--update-freq", 4, "--save-dir", folder)
            fairseq("train", lm_data, *_recipe("e_d_m" if count == "2" else "e"), *alone)
            files[count] = _load(folder)
        return files[count]

    return of


# These two recipes together use every kind of parallelism of the recipes parallel_*.
@pytest.mark.parametrize("form", ["e_d_m", "e_z_offload"])
def test_four_ranks_and_one_process_train_equal_models_of_a_recipe(form, lm_data, one_process, tmp_path):
    run = fairseq("train", lm_data, *_recipe(form), "--save-dir", tmp_path, ranks=4)
    assert ("this rank keeps the optimizer state of" in run.output) == ("z" in form)
    slices = "Strategy(adaptive_r=2" in run.output
    assert slices == ("m" in form), tail(run.output)
    _same_training(one_process(form), _load(tmp_path), adam=True)
