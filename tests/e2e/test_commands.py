"""Runs every fairseq command with a MoE model."""

import math
import re

import pytest
import torch
from cli import HYDRA, ROOT, USER_DIR, fairseq
from models import lm_args, mt_args

PACKAGE = str(ROOT / "fairseq_tutel")
ALL = ("--required-batch-size-multiple", 1)  # with this flag, fairseq keeps a smaller last batch
EXPERT_METRICS = {
    "moe_gate_loss", "moe_gshard_loss", "entropy_gating", "expert1_balance_top",
    "expert1_balance_bottom", "unused_expert1_count", "overflow_expert1", "expert2_balance_top",
    "expert2_balance_bottom", "unused_expert2_count", "overflow_expert2",
}  # fmt: skip


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """The folder of a language model that two ranks trained, and the finished training command."""
    folder = tmp_path_factory.mktemp("lm-run")
    extra = ("--record-a2a-perf-stats", "--lr", 0.02)
    return folder, fairseq("train", *lm_args(lm_data, folder, *extra, updates=40), ranks=2)


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """The folder of a translation model that two ranks trained, and the finished training command."""
    folder = tmp_path_factory.mktemp("mt-run")
    bleu = ("--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 12}')
    words = (*bleu, "--user-dir", PACKAGE)  # the package folder can be the --user-dir
    return folder, fairseq("train", *mt_args(mt_data, folder, *words, updates=8), ranks=2)


def test_training_reduces_the_loss_and_logs_expert_metrics(lm):
    _, run = lm
    first, *_, last = run.stats("train_inner")
    assert first.keys() >= EXPERT_METRICS | {"loss", "nll_loss", "ppl", "gnorm", "clip"}
    assert float(last["ppl"]) < 0.6 * float(first["ppl"])
    assert float(last["all_to_all_cpu_time_ms"]) > 0
    assert "expert parallel size 2, replicas 1" in run.output
    for record in run.stats("train_inner"):
        gate = 0.01 * float(record["moe_gate_loss"]) / math.log(2)
        assert float(record["loss"]) == pytest.approx(float(record["nll_loss"]) + gate, abs=2e-3)


def test_eval_lm_gives_the_validation_perplexity(lm, lm_data):
    folder, run = lm
    found = fairseq(
        "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", folder / "checkpoint_last.pt",
        "--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 8, *ALL,
    )  # fmt: skip
    perplexity = float(re.search(r"Perplexity: ([\d.]+)", found.output)[1])
    assert perplexity == pytest.approx(float(run.stats("valid")[-1]["valid_ppl"]), rel=0.01)


def test_validate_gives_the_validation_loss_of_the_training_run(lm, lm_data):
    folder, run = lm
    found = fairseq(
        "validate", lm_data, "--user-dir", USER_DIR, "--task", "moe_language_modeling",
        "--path", folder / "checkpoint_last.pt", "--batch-size", 4, "--log-format", "json",
        *ALL,
    )  # fmt: skip
    expected = float(run.stats("valid")[-1]["valid_loss"])
    assert float(found.stats("valid")[-1]["valid_loss"]) == pytest.approx(expected, abs=0.02)


def test_interactive_continues_a_line_of_text(lm, lm_data, tmp_path):
    (tmp_path / "in.txt").write_text("w1 w3 w9\nw2\n")
    found = fairseq(
        "interactive", lm_data, "--user-dir", USER_DIR, "--task", "language_modeling",
        "--path", lm[0] / "checkpoint_last.pt", "--input", tmp_path / "in.txt", "--max-len-b", 8,
        "--beam", 2,
    )  # fmt: skip
    lines = re.findall(r"^H-\d+\t\S+\t(.*)$", found.output, re.M)
    assert len(lines) == 2
    assert lines[0].startswith("w1 w3 w9 ")


def test_generate_and_interactive_give_equal_translations(mt, mt_data, tmp_path):
    path = ("--path", mt[0] / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 8)
    assert "valid_bleu" in mt[1].stats("valid")[-1]
    whole = fairseq(
        "generate", mt_data, "--user-dir", USER_DIR, "--task", "moe_translation", *path,
        "--batch-size", 7, *ALL,
    )  # fmt: skip
    assert "BLEU4" in whole.output
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", whole.output, re.M))
    expected = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", whole.output, re.M))
    assert len(sources) == 21
    keys = sorted(sources, key=int)[:3]
    (tmp_path / "in.txt").write_text("\n".join(sources[k] for k in keys) + "\n")
    one = fairseq(
        "interactive", mt_data, "--user-dir", USER_DIR, *path, "--input", tmp_path / "in.txt",
    )  # fmt: skip
    # The outputs do not depend on the batch size, because the experts drop no assignment.
    found = re.findall(r"^H-\d+\t\S+\t(.*)$", one.output, re.M)
    assert found == [expected[k] for k in keys]


def test_generate_on_two_ranks_outputs_every_sentence(mt, mt_data):
    run = fairseq(
        "generate", mt_data, "--user-dir", USER_DIR, "--path", mt[0] / "checkpoint_last.pt",
        "--beam", 2, "--max-len-b", 8, "--batch-size", 5, *ALL, ranks=2,
    )  # fmt: skip
    found = set(re.findall(r"^H-(\d+)", run.output, re.M))
    assert found == {str(i) for i in range(21)}


def test_hydra_trains_a_configuration_of_this_repository(lm_data, tmp_path):
    run = fairseq(
        "hydra-train", "--config-dir", HYDRA, "--config-name", "tiny_lm", f"task.data={lm_data}",
        f"checkpoint.save_dir={tmp_path}", "optimization.max_update=2", "dataset.num_workers=0",
        "common.log_interval=1", "dataset.required_batch_size_multiple=1", "model.decoder_layers=2",
        "model._name=moe_transformer_lm_gpt", env={"PWD": str(ROOT)},
    )  # fmt: skip
    assert "done training" in run.output
    assert "expert1_balance_top" in run.output
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    assert any("fc1.experts.fc1_weight" in key for key in saved["model"])


def test_experts_train_with_the_task_and_criterion_of_fairseq_without_a_balance_loss(lm_data, tmp_path):
    stock = ("--task", "language_modeling", "--criterion", "cross_entropy", "--optimizer", "adam")
    args = lm_args(lm_data, tmp_path, *stock, "--disable-validation", updates=2)
    run = fairseq("train", *args, ranks=2)
    assert run.output.count("trains the experts without a balance loss") == 1
    assert run.output.count("replaced the optimizer adam by moe_adam") == 1
    assert "expert parallel size 2" in run.output
    assert "moe_gate_loss" not in run.output
