"""Converts dense models to MoE models with `convert upcycle`, trains them, and converts them back."""

import re
import subprocess
import sys

import pytest
import torch
from cli import USER_DIR, fairseq
from models import lm_args, mt_args
from tool_in_process import tool


def dense_args(args):
    """Convert training arguments for a MoE model to training arguments for a dense model."""
    dense, words = [], iter(map(str, args))
    for word in words:
        if word.startswith("--moe-"):
            next(words)
        else:
            dense.append(word.replace("moe_", "") if word != USER_DIR else word)
    return dense


def convert(kind, source, target, *words):
    """Run `fairseq-tutel convert KIND`; return the printed text."""
    return tool("convert", kind, "--input", source, "--output", target, *words)


def outputs(path, data):
    """Return the logits of a checkpoint's model for fixed random tokens."""
    from fairseq import checkpoint_utils

    from fairseq_tutel import plugin

    plugin.register()
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(data)}
    )
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, len(task.source_dictionary), (4, 12), generator=generator)
    tokens[1, 8:] = task.source_dictionary.pad()
    inputs = (tokens,)
    if hasattr(model, "decoder") and hasattr(model, "encoder"):
        inputs = (tokens, torch.full((4,), 12), tokens)
    with torch.no_grad():
        scores = model.eval()(*inputs)[0]
    return scores[[0, 2, 3]]  # outputs at padding are undefined


def same_outputs(a, b, data, tolerance=1e-5):
    torch.testing.assert_close(outputs(b, data), outputs(a, data), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """The checkpoint of a dense language model after six updates."""
    folder = tmp_path_factory.mktemp("lm")
    fairseq("train", *dense_args(lm_args(lm_data, folder)))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """The checkpoint of a dense translation model after six updates."""
    folder = tmp_path_factory.mktemp("mt")
    fairseq("train", *dense_args(mt_args(mt_data, folder)))
    return folder / "checkpoint_last.pt"


def test_an_upcycled_model_has_the_validation_loss_of_the_dense_model(lm, lm_data, tmp_path):
    def loss(path):
        run = fairseq(
            "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", path, "--tokens-per-sample", 16,
            "--batch-size", 8, "--gen-subset", "valid", "--required-batch-size-multiple", 1,
        )  # fmt: skip
        return float(re.search(r"Loss \(base 2\): ([\d.]+)", run.output)[1])

    convert("upcycle", lm, tmp_path / "moe.pt")
    assert loss(tmp_path / "moe.pt") == pytest.approx(loss(lm), abs=1.01e-4)  # the log has 4 decimals


def older(path, target):
    """Write a checkpoint in the format of fairseq before hydra, with all options in one namespace."""
    state = torch.load(path, weights_only=False)
    model = state.pop("cfg")["model"]
    torch.save({**state, "args": model}, target)
    return target


def test_an_upcycled_checkpoint_of_an_older_fairseq_gives_the_dense_model_s_outputs(mt, mt_data, tmp_path):
    source = older(mt, tmp_path / "older.pt")
    words = ("--encoder-moe-freq", 2, "--decoder-moe-freq", 1, "--moe-expert-count", "2,3,4")
    text = convert("upcycle", source, tmp_path / "moe.pt", *words)
    assert "2,3,4 experts of 32, top-2, in encoder_1, decoder_0, decoder_1" in text
    same_outputs(mt, tmp_path / "moe.pt", mt_data)


ON = ("--moe-freq", 2, "--moe-expert-count", 4)


def test_an_upcycled_model_trains_with_finetune_from_model_and_with_restore_file(lm, lm_data, tmp_path):
    convert("upcycle", lm, tmp_path / "moe.pt", *ON)
    ways = {
        "finetune": ("--finetune-from-model", tmp_path / "moe.pt"),
        "restore": ("--restore-file", tmp_path / "moe.pt", "--reset-optimizer"),
    }
    found = {}
    for name, (words, ranks) in {n: (w, 1 + (n == "restore")) for n, w in ways.items()}.items():
        run = fairseq(
            "train", *lm_args(lm_data, tmp_path / name, *ON, *words, "--update-freq", 2 // ranks),
            ranks=ranks,
        )  # fmt: skip
        found[name] = [float(s["nll_loss"]) for s in run.stats("train_inner")]
        assert "the checkpoint was trained with" not in run.output
        valid = float(run.stats("valid")[-1]["valid_nll_loss"])
        assert valid < torch.load(lm, weights_only=False)["extra_state"]["val_loss"] - 0.1
    assert len(found["finetune"]) == 6
    assert found["finetune"] == pytest.approx(found["restore"], rel=1e-3)
    saved = torch.load(tmp_path / "finetune" / "checkpoint_last.pt", weights_only=False)["model"]
    stack = saved["decoder.layers.1.fc1.experts.fc1_weight"]
    assert (stack[0] - stack[1]).abs().max() > 1e-4


def test_fairseq_opens_a_pruned_model_and_a_model_converted_back_to_dense(lm, lm_data, tmp_path):
    words = ("--finetune-from-model", tmp_path / "moe.pt", "--moe-top-k", 1)
    convert("upcycle", lm, tmp_path / "moe.pt", *ON, "--reinitialize", 0.5)
    run = fairseq("train", *lm_args(lm_data, tmp_path, *ON, *words), "--log-file", tmp_path / "t.log")
    trained = tmp_path / "checkpoint_last.pt"
    busy = run.stats("train_inner")[-1]["moe_load_decoder_1"]
    assert len(busy) == 4
    made = {}
    for name, kind, options in (
        ("pruned", "prune", ("--share", 0.5, "--log", tmp_path / "t.log")),
        ("dense", "dense", ("--experts", 1)),
    ):
        made[name] = tmp_path / f"{name}.pt"
        convert(kind, trained, made[name], *options)
        outputs(made[name], lm_data)
    # A new process shows that fairseq opens the dense model without the plugin.
    words = (lm_data, "--path", made["dense"], "--tokens-per-sample", 16, "--batch-size", 8, "--cpu")
    ended = subprocess.run(
        [sys.executable, "-m", "fairseq_cli.eval_lm", *map(str, words)], capture_output=True, text=True
    )
    assert ended.returncode == 0 and "Perplexity" in ended.stdout + ended.stderr, ended.stderr
