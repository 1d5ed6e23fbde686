"""Tests of fairseq's options for keeping, loading, averaging and combining checkpoints of MoE models."""

import math
import re

import pytest
import torch
from cli import USER_DIR, fairseq
from models import lm_args, mt_args
from tool_in_process import tool

# With these options, fairseq keeps a smaller last batch and starts no worker processes.
ALL = ("--required-batch-size-multiple", 1, "--num-workers", 0)
FRESH = ("--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader", "--reset-meters")
EXPERTS = "decoder.layers.0.fc1.experts.fc1_weight"


def load(path):
    return torch.load(path, weights_only=False)


def names(folder, pattern="*.pt"):
    return sorted(path.name for path in folder.glob(pattern))


def same_weights(a, b):
    assert a["model"].keys() == b["model"].keys()
    for key, weight in a["model"].items():
        assert torch.equal(weight, b["model"][key]), key


def without(words, *flags, values=1):
    """Return command-line words without the given flags; `values` is the number of values per flag."""
    words = list(words)
    for flag in flags:
        at = words.index(flag)
        del words[at : at + 1 + values]
    return words


def dense(words, arch, task, criterion):
    """Convert a command line that trains a MoE model to a command line that trains a dense model."""
    stock = ("--arch", arch, "--task", task, "--criterion", criterion, "--optimizer", "adam")
    return [*without(words, "--moe-freq", "--moe-expert-count"), *stock]


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """The --save-dir and the finished training command of a language model after four epochs."""
    folder = tmp_path_factory.mktemp("lm-day")
    words = without(lm_args(lm_data, folder), "--max-update")
    words = without(words, "--no-epoch-checkpoints", values=0)
    run = fairseq(
        "train", *words, "--batch-size", 16, "--max-epoch", 4, "--update-freq", "1,2",
        "--curriculum", 1, "--save-interval-updates", 5, "--keep-interval-updates", 2,
        "--keep-last-epochs", 3, "--keep-best-checkpoints", 2, "--best-checkpoint-metric", "ppl",
        "--fixed-validation-seed", 7,
    )  # fmt: skip
    return folder, run


# Keeping checkpoints


def test_training_keeps_the_newest_and_the_best_checkpoints(lm):
    folder, run = lm
    assert names(folder, "checkpoint[0-9]*.pt") == [f"checkpoint{n}.pt" for n in (2, 3, 4)]
    assert names(folder, "checkpoint_[0-9]*.pt") == ["checkpoint_3_30.pt", "checkpoint_4_35.pt"]
    scores = [float(record["valid_ppl"]) for record in run.stats("valid")]
    kept = [float(re.search(r"ppl_([\d.]+)\.pt", n)[1]) for n in names(folder, "*best_ppl*")]
    assert kept == pytest.approx(sorted(scores)[:2], abs=0.01)
    best = load(folder / "checkpoint_best.pt")["extra_state"]
    assert best["val_loss"] == best["best"] == pytest.approx(min(scores), abs=0.006)


# Loading checkpoints


def test_finetune_from_model_loads_only_the_weights_of_a_moe_model(lm, lm_data, tmp_path):
    base = lm[0] / "checkpoint_best.pt"
    # With learning rate 0, training does not change the loaded weights.
    words = ("--finetune-from-model", base, "--lr", 0, "--train-subset", "test", "--batch-size", 8)
    run = fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=1))
    assert "loading pretrained model from" in run.output
    found = load(tmp_path / "checkpoint_last.pt")
    same_weights(load(base), found)
    assert found["model"][EXPERTS].shape[0] == 4
    _started_afresh(found, updates=1)
    assert _steps(found) == {1}
    # When the same command runs again, training resumes from the checkpoint in --save-dir.
    fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=2))
    assert _steps(load(tmp_path / "checkpoint_last.pt")) == {2}


def _started_afresh(state, updates):
    assert state["optimizer_history"][-1]["num_updates"] == updates
    assert state["extra_state"]["train_iterator"]["epoch"] == 1
    assert state["extra_state"]["train_iterator"]["iterations_in_epoch"] == updates


def _steps(state):
    """Return the set of update counts in the optimizer state."""
    return {int(weight["step"]) for weight in state["last_optimizer_state"]["state"].values()}


def test_restore_file_with_every_reset_loads_only_the_weights(lm, lm_data, tmp_path):
    base = lm[0] / "checkpoint4.pt"
    words = ("--restore-file", base, *FRESH, "--lr", 0, "--optimizer", "moe_sgd", "--momentum", 0.9)
    fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=2), ranks=2)
    found = load(tmp_path / "checkpoint_last.pt")
    same_weights(load(base), found)
    _started_afresh(found, updates=2)
    assert found["optimizer_history"][-1]["optimizer_name"] == "MoESGD"


def test_restore_file_loads_the_optimizer_state_if_only_data_and_meters_are_reset(lm, lm_data, tmp_path):
    base = lm[0] / "checkpoint4.pt"
    # Gradients are clipped to almost 0, so an update only multiplies Adam's first moment by 0.9.
    words = ("--restore-file", base, "--reset-dataloader", "--reset-meters", "--clip-norm", 1e-12)
    fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=40), ranks=2)
    found = load(tmp_path / "checkpoint_last.pt")
    assert _steps(found) == {40}
    assert found["extra_state"]["train_iterator"]["epoch"] == 1
    moments = load(base)["last_optimizer_state"]["state"]
    for key, state in found["last_optimizer_state"]["state"].items():
        before = moments[key]["exp_avg"]
        torch.testing.assert_close(state["exp_avg"], 0.9 * before, rtol=1e-5, atol=1e-9)


# Averages


def test_eval_lm_evaluates_an_average_of_moe_checkpoints(lm, lm_data, tmp_path):
    averaged_lm = tmp_path / "mean.pt"
    flags = ("--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 3)
    tool("average", "--inputs", lm[0], "--output", averaged_lm, *flags)
    states = [load(lm[0] / f"checkpoint{n}.pt") for n in (3, 2)]
    found = load(averaged_lm)
    for key, weight in found["model"].items():
        expected = sum(state["model"][key] for state in states) / 2
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7, msg=key)
    assert found["extra_state"]["train_iterator"] == states[0]["extra_state"]["train_iterator"]
    run = fairseq(
        "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", averaged_lm, "--gen-subset", "valid",
        "--tokens-per-sample", 16, "--batch-size", 16, *ALL,
    )  # fmt: skip
    perplexity = float(re.search(r"Perplexity: ([\d.]+)", run.output)[1])
    at_epoch = {int(r["valid_num_updates"]): float(r["valid_ppl"]) for r in lm[1].stats("valid")}
    assert at_epoch[31] * 0.9 < perplexity < at_epoch[23]


# Ensembles


def _generate(data, path, *words):
    return fairseq(
        "generate", data, "--user-dir", USER_DIR, "--path", path, "--batch-size", 8, *words, *ALL
    )


def _log_probabilities(data, *paths):
    """Return the log2 probability that the models' ensemble gives to each reference token."""
    run = _generate(data, ":".join(map(str, paths)), "--score-reference")
    lines = dict(re.findall(r"^P-(\d+)\t(.*)$", run.output, re.M))
    return [float(value) for key in sorted(lines, key=int) for value in lines[key].split()]


def _is_mean_of_probabilities(ensemble, one, other):
    assert len(ensemble) == len(one) == len(other) > 100
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1
    expected = [math.log2((2**a + 2**b) / 2) for a, b in zip(one, other, strict=True)]
    assert ensemble == pytest.approx(expected, abs=1e-3)


def test_generate_combines_a_moe_model_and_a_dense_model_in_an_ensemble(mt_data, tmp_path):
    words = ("--moe-expert-count", 2, "--seed", 2, "--disable-validation")
    fairseq("train", *mt_args(mt_data, tmp_path / "two", *words))
    stock = ("transformer_iwslt_de_en", "translation", "label_smoothed_cross_entropy")
    fairseq("train", *dense(mt_args(mt_data, tmp_path / "dense", "--disable-validation"), *stock))
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("dense", "two")]
    alone = [_log_probabilities(mt_data, path) for path in paths]
    _is_mean_of_probabilities(_log_probabilities(mt_data, *paths), *alone)
