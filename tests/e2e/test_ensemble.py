"""Trains ensembles, with and without confident multiple choice learning, through fairseq-train."""

import numpy as np
import pytest
import torch
from cli import ROOT, USER_DIR, fairseq
from equality import facts_of, same_bits, same_weights
from tool_in_process import convert

SIZE = 3
TINY = (
    "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-input-dim", 16,
    "--decoder-output-dim", 16, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2,
)  # fmt: skip
KINDS = {
    "dense": (
        "--ensemble-arch", "transformer_lm", "--criterion", "cmcl", "--cmcl-overlap", 1,
        "--optimizer", "sgd",
    ),
    "experts": (
        "--ensemble-arch", "moe_transformer_lm_gpt", "--criterion", "moe_cmcl", "--cmcl-overlap", 2,
        "--moe-freq", 2, "--moe-expert-count", 4, "--optimizer", "moe_sgd", "--attention-dropout", 0,
    ),
}  # fmt: skip


def lm_args(data, folder, *extra, updates=4, kind="dense"):
    return [
        data, "--user-dir", USER_DIR, "--task", "moe_language_modeling", "--arch", "ensemble_of",
        "--ensemble-size", SIZE, *TINY, *KINDS[kind], "--dropout", 0, "--tokens-per-sample", 16,
        "--batch-size", 4, "--lr", 0.5, "--clip-norm", 0.5, "--max-update", updates, "--log-format",
        "json", "--log-interval", 1, "--save-dir", folder, "--no-epoch-checkpoints", "--num-workers", 0,
        "--required-batch-size-multiple", 1, "--ddp-backend", "legacy_ddp", "--update-freq", 2, *extra,
    ]  # fmt: skip


def load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    run = fairseq("train", *lm_args(lm_data, folder, kind=request.param))
    return request.param, folder, run


@pytest.mark.parametrize(
    "trained", [pytest.param("dense", marks=pytest.mark.long), "experts"], indirect=True
)
def test_two_ranks_train_the_same_ensemble_as_one_rank(trained, lm_data, tmp_path):
    kind, folder, run = trained
    fairseq("train", *lm_args(lm_data, tmp_path, "--update-freq", 1, kind=kind), ranks=2)
    expected, found = load(folder), load(tmp_path)
    assert facts_of(found) == pytest.approx(facts_of(expected), rel=1e-5, abs=1e-6)
    same_weights(expected["model"], found["model"], adam=False)
    last = run.stats("train_inner")[-1]
    accuracies = [float(last[f"member{m}_accuracy"]) for m in range(SIZE)]
    assert float(last["member_accuracy"]) == pytest.approx(sum(accuracies) / SIZE, abs=0.02)
    assert float(last["oracle_error"]) <= 100 - max(accuracies)
    if kind == "experts":
        assert "moe_load_member2_decoder_1" in last and float(last["moe_gate_loss"]) > 0.5
        name = "members.{}.decoder.layers.1.fc1.experts.fc1_weight"
        first, second = (load(folder)["model"][name.format(m)] for m in (0, 1))
        assert (first - second).abs().mean() > 0.01


def loss_of(run):
    return float(run.output.split("Loss (base 2): ")[1].split(",")[0])


@pytest.mark.parametrize("trained", ["dense"], indirect=True)
def test_an_ensemble_is_evaluated_as_one_model_and_as_separate_members(trained, lm_data, tmp_path):
    _, folder, run = trained
    data = (lm_data, "--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 8)
    one = fairseq("eval-lm", *data, "--user-dir", USER_DIR, "--path", folder / "checkpoint_last.pt")
    convert("members", "--input", folder / "checkpoint_last.pt", "--output", tmp_path / "members")
    paths = [tmp_path / "members" / f"member{m}.pt" for m in range(SIZE)]
    alone = fairseq("eval-lm", *data, "--path", paths[1])
    # A single member predicts worse than the ensemble, because each member learns only some samples.
    assert 0 < loss_of(one) < loss_of(alone)
    of_ensemble, of_member = load(folder)["model"], torch.load(paths[1], weights_only=False)["model"]
    same_bits({key: of_ensemble[f"members.1.{key}"] for key in of_member}, of_member)
    validated = fairseq(
        "validate", lm_data, "--user-dir", USER_DIR, "--task", "moe_language_modeling", "--valid-subset",
        "valid", "--path", folder / "checkpoint_last.pt", "--batch-size", 4,
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    last = run.stats("valid")[-1]
    assert f"nll_loss {float(last['valid_nll_loss']):.3f}".rstrip("0") in validated.output


EXAMPLE = str(ROOT / "examples" / "cmcl")


def images(folder):
    """Write image files with 3 classes that a tiny network can learn; return the folder."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 96), ("valid", 30)):
        labels = rng.integers(3, size=count)
        pixels = rng.integers(0, 120, size=(count, 8, 8))
        pixels[np.arange(count), labels] += 120
        np.savez(folder / f"{split}.npz", images=pixels.astype(np.uint8), labels=labels)
    return folder


def image_args(data, folder):
    return [
        data, "--user-dir", EXAMPLE, "--task", "image_classification", "--arch", "ensemble_of",
        "--ensemble-arch", "tiny_mlp", "--tiny-hidden", 8, "--ensemble-size", SIZE, "--criterion", "cmcl",
        "--cmcl-overlap", 1, "--ensemble-share-after", "hidden", "--ensemble-share-keep", 1,
        "--optimizer", "adam", "--lr", 0.03, "--batch-size", 12, "--max-epoch", 6, "--save-dir", folder,
        "--log-format", "json", "--no-epoch-checkpoints", "--num-workers", 0, "--ddp-backend",
        "legacy_ddp", "--required-batch-size-multiple", 1, "--update-freq", 2,
    ]  # fmt: skip


def test_each_image_is_learned_by_some_member_of_an_ensemble(tmp_path):
    data = images(tmp_path / "data")
    run = fairseq("train", *image_args(data, tmp_path / "run"))
    last = run.stats("valid")[-1]
    assert float(last["valid_oracle_error"]) < 10
    assert float(last["valid_member_accuracy"]) < 70 < float(last["valid_accuracy"])
