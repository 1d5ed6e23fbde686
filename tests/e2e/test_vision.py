"""Trains a small SwinV2-MoE on the digits of scikit-learn through fairseq's commands."""

import csv
import re

import numpy as np
import pytest
import torch
from cli import USER_DIR, fairseq
from equality import facts_of, same_weights
from sklearn.datasets import load_digits
from test_sharded_checkpoints import load
from tool_in_process import tool

AUGMENTED = ("--image-crop-padding", 1, "--image-flip", 0.2, "--image-mixup", 0.2)
BY_ACCURACY = ("--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric")
UPDATES = 6  # one epoch has 4 updates


def swin_args(data, save_dir, *extra):
    """Return the arguments to train a small SwinV2-MoE; arguments in `extra` override the others."""
    return [
        data, "--user-dir", USER_DIR, "--task", "moe_image_classification",
        "--arch", "swin_v2_moe_tiny", "--criterion", "moe_image_classification", "--label-smoothing", 0.1,
        "--swin-embed-dim", 8, "--swin-expert-dropout", 0, "--moe-gate-noise", 0,
        "--moe-balance-loss", "gshard:1", "--moe-expert-count", 4,
        "--batch-size", 11, "--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.1,
        "--max-update", UPDATES, "--log-format", "json", "--log-interval", 1, "--save-dir", save_dir,
        "--no-epoch-checkpoints", "--num-workers", 0, "--update-freq", 2, *BY_ACCURACY, *AUGMENTED, *extra,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folder with 88 images of digits for training and 40 images for validation."""
    folder, found = tmp_path_factory.mktemp("digits"), load_digits()
    pixels = (found.images * 255 / 16).astype(np.uint8)
    for split, part in (("train", slice(88)), ("valid", slice(88, 128))):
        np.savez(folder / f"{split}.npz", images=pixels[part], labels=found.target[part])
    return folder


@pytest.fixture(scope="module")
def plain(digits, tmp_path_factory):
    """The --save-dir and the finished training command of a run on one rank."""
    folder = tmp_path_factory.mktemp("plain")
    run = fairseq("train", *swin_args(digits, folder))
    return folder, run


@pytest.fixture(scope="module")
def sharded(digits, tmp_path_factory):
    """The --save-dir of a training run on two ranks with expert parallelism and ZeRO stage 1."""
    folder = tmp_path_factory.mktemp("sharded")
    flags = (
        "--update-freq", 1, "--moe-zero-stage", 1, "--moe-checkpoint", "sharded",
        "--moe-expert-parallel-size", 2,
    )  # fmt: skip
    fairseq("train", *swin_args(digits, folder, *flags), ranks=2)
    return folder


def same_training(expected, found):
    assert facts_of(found) == pytest.approx(facts_of(expected), rel=1e-5, abs=1e-6)
    same_weights(expected["model"], found["model"], adam=False)


def test_two_ranks_train_the_same_image_model_as_one_rank(plain, sharded):
    expected = load(plain[0])
    assert facts_of(expected)["moe_gate_loss 0"] > 0
    same_training(expected, load(sharded))


def test_the_best_checkpoint_has_the_highest_accuracy(plain):
    folder, run = plain
    accuracies = {
        int(record["valid_num_updates"]): float(record["valid_accuracy"]) for record in run.stats("valid")
    }
    assert len(accuracies) >= 2
    assert all(float(record["valid_top5_accuracy"]) >= 40 for record in run.stats("valid"))
    best = torch.load(folder / "checkpoint_best.pt", weights_only=False)
    assert best["extra_state"]["best"] == pytest.approx(max(accuracies.values()), abs=0.01)
    assert accuracies[best["optimizer_history"][-1]["num_updates"]] == max(accuracies.values())


def test_fairseq_validate_and_predict_give_the_same_accuracy(sharded, digits, tmp_path):
    """One process opens the sharded checkpoint that two ranks wrote."""
    (tmp_path / "valid.npz").write_bytes((digits / "valid.npz").read_bytes())
    checkpoint, table = sharded / "checkpoint_last.pt", tmp_path / "found.csv"
    words = ("--user-dir", USER_DIR, "--task", "image_classification", "--path", checkpoint)
    found = fairseq("validate", tmp_path, *words, "--batch-size", 16, "--log-format", "simple").output
    accuracy = re.search(r"accuracy ([\d.]+)", found)[1]
    printed = tool("predict", checkpoint, tmp_path, "--output", table)
    assert f"images right, {float(accuracy):.2f} %" in printed and f"wrote {table}" in printed
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 40 and lines[3]["image"].endswith("valid.npz[3]")
    right = sum(line["class"] == line["class_1"] for line in lines)
    assert right / 40 == pytest.approx(float(accuracy) / 100)
    probabilities = [float(lines[0][f"probability_{k}"]) for k in range(1, 6)]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) < 1


HYDRA_FILE = """
common: {cpu: true, log_format: json, user_dir: %s}
task: {_name: moe_image_classification, data: "???", image_size: 8}
model: {_name: swin_v2_moe_tiny, swin_embed_dim: 8, moe_expert_count: "4"}
criterion: {_name: moe_image_classification, label_smoothing: 0.1}
dataset: {batch_size: 11, num_workers: 0, valid_subset: "valid,train"}
optimization: {max_update: 2, lr: [0.000001]}
optimizer: {_name: moe_adam}
lr_scheduler: {_name: fixed}
checkpoint: {save_dir: "???", best_checkpoint_metric: accuracy, maximize_best_checkpoint_metric: true}
"""


def test_hydra_finetunes_an_image_model_on_a_data_set_with_fewer_classes(plain, digits, tmp_path):
    """Equal images in two splits must have equal validation losses, because only training flips images."""
    with np.load(digits / "train.npz") as file:
        kept = file["labels"] < 9
        for split in ("train", "valid"):
            arrays = {name: file[name][kept] for name in ("images", "labels")}
            np.savez(tmp_path / f"{split}.npz", **arrays)
    (tmp_path / "images.yaml").write_text("# @package _group_\n" + HYDRA_FILE % USER_DIR)
    run = fairseq(
        "hydra-train", "--config-dir", tmp_path, "--config-name", "images", f"task.data={tmp_path}",
        f"checkpoint.save_dir={tmp_path}", "+task.image_flip=0.5",
        f"checkpoint.finetune_from_model={plain[0] / 'checkpoint_last.pt'}",
    )  # fmt: skip
    assert "done training" in run.output
    assert "checkpoint_last.pt is 9, but in" in run.output and "so the model gets a new head" in run.output
    seen = [re.findall(rf'"{split}_loss": "([\d.]+)"', run.output) for split in ("valid", "train")]
    assert seen[0][-1] in seen[1]
    assert float(re.findall(r'"valid_top5_accuracy": "([\d.]+)"', run.output)[-1]) > 20
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    assert saved["cfg"]["task"]["image_flip"] == 0.5
    images = saved["task_state"]["images"]
    assert images["shape"] == [1, 8, 8] and len(images["classes"]) == 9
    before = load(plain[0])["model"]
    assert saved["model"].keys() == before.keys() and len(saved["model"]["head.bias"]) == 9
    for name in before.keys() - {"head.weight", "head.bias"}:
        torch.testing.assert_close(saved["model"][name], before[name], rtol=0, atol=1e-5)
