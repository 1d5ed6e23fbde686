"""The usual commands around a training run with experts, through the real command lines."""

import json
import math
import re

import pytest
import torch
from cli import ROOT, USER_DIR, fairseq, refused
from models import lm_args, mt_args
from tool_in_process import tool

# Every sentence, also those of a last, smaller batch; and no worker process, which takes seconds to start.
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
    """Return a command line without some flags and their values."""
    words = list(words)
    for flag in flags:
        at = words.index(flag)
        del words[at : at + 1 + values]
    return words


def dense(words, arch, task, criterion):
    """Return the command line of a MoE model as that of its dense twin."""
    stock = ("--arch", arch, "--task", task, "--criterion", criterion, "--optimizer", "adam")
    return [*without(words, "--moe-freq", "--moe-expert-count"), *stock]


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """A language model of four short epochs, with most of the flags below; its folder and run.

    15 batches of 16 blocks: 15 updates in the first epoch, 8 in each that follows.
    """
    folder = tmp_path_factory.mktemp("lm-day")
    words = without(lm_args(lm_data, folder), "--max-update")
    words = without(words, "--no-epoch-checkpoints", values=0)
    run = fairseq(
        "train", *words, "--batch-size", 16, "--max-epoch", 4, "--update-freq", "1,2",
        "--curriculum", 1, "--save-interval-updates", 3, "--keep-interval-updates", 2,
        "--keep-last-epochs", 3, "--keep-best-checkpoints", 2, "--best-checkpoint-metric", "ppl",
        "--fixed-validation-seed", 7, "--log-file", folder / "log.txt",
    )  # fmt: skip
    return folder, run


@pytest.fixture(scope="module")
def dense_lm(lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense-lm")
    words = lm_args(lm_data, folder, updates=10)
    fairseq("train", *dense(words, "transformer_lm", "language_modeling", "cross_entropy"))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """A translation model chosen by its BLEU; its folder and run."""
    folder = tmp_path_factory.mktemp("mt-day")
    run = fairseq(
        "train", *mt_args(mt_data, folder, updates=60), "--eval-bleu",
        "--eval-bleu-args", '{"beam": 1, "max_len_b": 10}', "--best-checkpoint-metric", "bleu",
        "--maximize-best-checkpoint-metric", "--keep-best-checkpoints", 2,
        "--save-interval-updates", 20, "--max-tokens", 400, "--save-interval", 100,
        "--validate-interval", 100,
    )  # fmt: skip
    return folder, run


# What a training leaves behind


def test_the_last_epochs_last_updates_and_best_checkpoints_are_kept(lm):
    folder, run = lm
    assert names(folder, "checkpoint[0-9]*.pt") == [f"checkpoint{n}.pt" for n in (2, 3, 4)]
    assert names(folder, "checkpoint_[0-9]*.pt") == ["checkpoint_4_33.pt", "checkpoint_4_36.pt"]
    scores = [float(record["valid_ppl"]) for record in run.stats("valid")]
    kept = [float(re.search(r"ppl_([\d.]+)\.pt", n)[1]) for n in names(folder, "*best_ppl*")]
    assert kept == pytest.approx(sorted(scores)[:2], abs=0.01)
    best = load(folder / "checkpoint_best.pt")["extra_state"]
    assert best["val_loss"] == best["best"] == pytest.approx(min(scores), abs=0.006)


def test_update_freq_and_shuffling_go_by_epoch(lm):
    _, run = lm
    assert [int(record["train_num_updates"]) for record in run.stats("train")] == [15, 23, 31, 39]
    sizes = [float(record["bsz"]) for record in run.stats("train_inner")]
    # Unshuffled, only the last batch is smaller; in shuffled pairs it may be anywhere.
    assert set(sizes[:14]) == {16}
    assert sizes[14] < 16
    assert max(sizes[15:]) == 32


def test_the_log_file_holds_the_records(lm):
    folder, run = lm
    # Stock opens the file once more in every epoch: in epoch n a line stands there n times.
    lines = dict.fromkeys((folder / "log.txt").read_text().splitlines())
    found = [json.loads(line[line.index("{") :]) for line in lines if '{"epoch"' in line]
    losses = [record["loss"] for record in found if "loss" in record]
    assert losses == [record["loss"] for record in run.stats("train_inner")]
    names = list(found[0])
    # A progress bar shows the first of them.
    assert names.index("lr") < names.index("moe_gate_loss") < names.index("entropy_gating")


def test_bleu_chooses_the_best_checkpoint(mt):
    folder, run = mt
    scores = [float(record["valid_bleu"]) for record in run.stats("valid")]
    assert len(scores) == 3
    assert max(scores) > min(scores)
    best = load(folder / "checkpoint_best.pt")["extra_state"]
    assert best["val_loss"] == best["best"] == pytest.approx(max(scores), abs=0.006)
    kept = [float(re.search(r"bleu_([\d.]+)\.pt", n)[1]) for n in names(folder, "*best_bleu*")]
    assert sorted(kept) == pytest.approx(sorted(scores)[-2:], abs=0.01)


def test_patience_ends_a_training_that_no_longer_gets_better(lm_data, tmp_path):
    # Learning rate 0: every validation gives the first one's loss.
    run = fairseq(
        "train", *lm_args(lm_data, tmp_path, updates=40), "--lr", 0, "--patience", 2,
        "--validate-interval-updates", 3,
    )  # fmt: skip
    assert "hasn't improved for last 2 runs" in run.output
    assert [int(record["valid_num_updates"]) for record in run.stats("valid")] == [3, 6, 9]
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 9


def test_a_time_limit_ends_a_training_and_files_can_be_left_out(lm_data, tmp_path):
    stub = ("--user-dir", ROOT / "tests" / "e2e" / "wandb_user_dir")
    env = {"LOGGED": str(tmp_path / "logged.json")}
    run = fairseq(
        "train", *lm_args(lm_data, tmp_path, updates=40), "--stop-time-hours", 1e-9,
        "--disable-validation", "--no-last-checkpoints", "--save-interval-updates", 1,
        "--wandb-project", "day", *stub, env=env,
    )  # fmt: skip
    assert "cumulative_training_time" in run.output
    assert run.stats("valid") == []
    assert names(tmp_path) == ["checkpoint_1_1.pt"]
    config, update, stats = json.loads((tmp_path / "logged.json").read_text())
    assert "model" in config and update == 1
    assert stats["train_inner/moe_gate_loss"] > 0


# Starting from a checkpoint


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_finetune_takes_the_weights_and_nothing_else(lm, lm_data, tmp_path, ranks):
    base = lm[0] / "checkpoint_best.pt"
    # Learning rate 0 keeps the weights as they were loaded; the test set is other data.
    words = ("--finetune-from-model", base, "--lr", 0, "--train-subset", "test", "--batch-size", 8)
    run = fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=1), ranks=ranks)
    assert "loading pretrained model from" in run.output
    found = load(tmp_path / "checkpoint_last.pt")
    same_weights(load(base), found)
    assert found["model"][EXPERTS].shape[0] == 4
    _started_afresh(found, updates=1)
    assert _steps(found) == {1}
    # The same command line, started again, goes on from its own checkpoint.
    if ranks == 1:
        fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=2))
        assert _steps(load(tmp_path / "checkpoint_last.pt")) == {2}


def _started_afresh(state, updates):
    assert state["optimizer_history"][-1]["num_updates"] == updates
    assert state["extra_state"]["train_iterator"]["epoch"] == 1
    assert state["extra_state"]["train_iterator"]["iterations_in_epoch"] == updates


def _steps(state):
    """Return the updates that Adam's moments of all weights have seen."""
    return {int(weight["step"]) for weight in state["last_optimizer_state"]["state"].values()}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_restore_file_with_every_reset_takes_the_weights_alone(lm, lm_data, tmp_path, ranks):
    base = lm[0] / "checkpoint4.pt"
    words = ("--restore-file", base, *FRESH, "--lr", 0, "--optimizer", "moe_sgd", "--momentum", 0.9)
    fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=2), ranks=ranks)
    found = load(tmp_path / "checkpoint_last.pt")
    same_weights(load(base), found)
    _started_afresh(found, updates=2)
    assert found["optimizer_history"][-1]["optimizer_name"] == "MoESGD"


def test_restore_file_keeps_what_is_not_reset(lm, lm_data, tmp_path):
    base = lm[0] / "checkpoint4.pt"
    # Gradients are clipped to nothing: what an update leaves of a moment is 0.9 of it.
    words = ("--restore-file", base, "--reset-dataloader", "--reset-meters", "--clip-norm", 1e-12)
    fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=40), ranks=2)
    found = load(tmp_path / "checkpoint_last.pt")
    assert _steps(found) == {40}
    assert found["extra_state"]["train_iterator"]["epoch"] == 1
    moments = load(base)["last_optimizer_state"]["state"]
    for key, state in found["last_optimizer_state"]["state"].items():
        before = moments[key]["exp_avg"]
        torch.testing.assert_close(state["exp_avg"], 0.9 * before, rtol=1e-5, atol=1e-9)


def test_finetune_from_a_dense_model_says_what_differs(dense_lm, lm_data, tmp_path):
    output = refused("train", *lm_args(lm_data, tmp_path, "--finetune-from-model", dense_lm))
    assert f"error: {dense_lm} does not fit this model" in output and "Missing key(s)" in output


def test_a_dense_model_resumes_on_several_ranks(dense_lm, lm_data, tmp_path):
    words = lm_args(lm_data, tmp_path, "--restore-file", dense_lm, updates=12)
    words = dense(words, "transformer_lm", "moe_language_modeling", "cross_entropy")
    run = fairseq("train", *words, ranks=2)
    assert run.stats("train_inner")[0]["num_updates"] == "11"
    assert "the wrapper was written" not in run.output  # fairseq is the one that is named there


# Averages


@pytest.fixture(scope="module")
def averaged_lm(lm, tmp_path_factory):
    output = tmp_path_factory.mktemp("average") / "mean.pt"
    flags = ("--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 3)
    tool("average", "--inputs", lm[0], "--output", output, *flags)
    return output


def test_average_of_experts_opens_and_is_evaluated(lm, averaged_lm, lm_data):
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


def test_average_is_resumed_from_on_two_ranks(averaged_lm, lm_data, tmp_path):
    words = ("--restore-file", averaged_lm, "--reset-optimizer", "--lr", 0, "--reset-dataloader")
    fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=1), ranks=2)
    same_weights(load(averaged_lm), load(tmp_path / "checkpoint_last.pt"))


def test_average_of_a_half_precision_training_is_what_a_resume_starts_from(lm_data, tmp_path):
    words = lm_args(lm_data, tmp_path, "--bf16", "--save-interval-updates", 2, updates=4)
    fairseq("train", *words, "--no-last-checkpoints")
    output = tmp_path / "mean.pt"
    tool("average", "--inputs", tmp_path, "--num-update-checkpoints", 2, "--output", output)
    words = ("--bf16", "--restore-file", output, "--lr", 0)
    fairseq("train", *lm_args(lm_data, tmp_path / "on", *words, updates=5))
    found = load(tmp_path / "on" / "checkpoint_last.pt")
    for key, weight in load(output)["model"].items():
        assert torch.equal(found["model"][key], weight.bfloat16().float()), key


def test_average_of_the_best_translates(mt, mt_data, tmp_path):
    files = sorted(mt[0].glob("checkpoint.best_bleu_*.pt"))
    tool("average", *files, "--output", tmp_path / "mean.pt")
    assert len(files) == 2
    run = _generate(mt_data, tmp_path / "mean.pt", "--beam", 2, "--max-len-b", 8)
    assert "BLEU4" in run.output


# Ensembles


def _generate(data, path, *words):
    return fairseq(
        "generate", data, "--user-dir", USER_DIR, "--path", path, "--batch-size", 8, *words, *ALL
    )


def _log_probabilities(data, *paths, words=()):
    """Return log2 of the probability of each reference token under an ensemble, in sentence order."""
    run = _generate(data, ":".join(map(str, paths)), "--score-reference", *words)
    lines = dict(re.findall(r"^P-(\d+)\t(.*)$", run.output, re.M))
    return [float(value) for key in sorted(lines, key=int) for value in lines[key].split()]


def _is_mean_of_probabilities(ensemble, one, other):
    assert len(ensemble) == len(one) == len(other) > 100
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1
    expected = [math.log2((2**a + 2**b) / 2) for a, b in zip(one, other, strict=True)]
    assert ensemble == pytest.approx(expected, abs=1e-3)


def test_ensemble_of_language_models_is_the_mean_of_their_probabilities(lm, lm_data):
    # fairseq-eval-lm takes one model; this scores lines, those that fit the model's 16 tokens.
    words = ("--task", "moe_language_modeling", "--sample-break-mode", "eos", "--gen-subset", "train",
             "--skip-invalid-size-inputs-valid-test")  # fmt: skip
    paths = [lm[0] / f"checkpoint{n}.pt" for n in (2, 4)]
    alone = [_log_probabilities(lm_data, path, words=words) for path in paths]
    _is_mean_of_probabilities(_log_probabilities(lm_data, *paths, words=words), *alone)


@pytest.fixture(scope="module")
def translators(mt, mt_data, tmp_path_factory):
    """Checkpoints of three translation models: 4 experts, 2 experts, dense."""
    folder = tmp_path_factory.mktemp("translators")
    fairseq("train", *mt_args(mt_data, folder / "two", "--moe-expert-count", 2, "--seed", 2))
    words = mt_args(mt_data, folder / "dense")
    stock = ("transformer_iwslt_de_en", "translation", "label_smoothed_cross_entropy")
    fairseq("train", *dense(words, *stock))
    return {
        "four": mt[0] / "checkpoint_last.pt",
        "two": folder / "two" / "checkpoint_last.pt",
        "dense": folder / "dense" / "checkpoint_last.pt",
    }


def test_ensemble_in_generate_mixes_expert_counts_and_dense_models(translators, mt_data):
    paths = [translators[name] for name in ("dense", "two")]
    alone = [_log_probabilities(mt_data, path) for path in paths]
    _is_mean_of_probabilities(_log_probabilities(mt_data, *paths), *alone)


def test_ensemble_searches_with_a_prefix_and_overrides(translators, mt_data):
    path = f"{translators['four']}:{translators['two']}"
    overrides = "{'moe_eval_capacity_factor': 1.25}"
    run = _generate(
        mt_data, path, "--beam", 2, "--max-len-b", 6, "--prefix-size", 1,
        "--model-overrides", overrides,
    )  # fmt: skip
    targets = dict(re.findall(r"^T-(\d+)\t(\S+)", run.output, re.M))
    first = dict(re.findall(r"^H-(\d+)\t\S+\t(\S+)", run.output, re.M))
    assert first == targets
    assert len(first) == 21
    assert run.output.count("(evaluation 1.25)") == 2
