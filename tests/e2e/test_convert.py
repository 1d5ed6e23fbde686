"""Checkpoints of other systems through the real commands: evaluated, translated with, trained on."""

import subprocess
import sys
from pathlib import Path

import meta_format
import pytest
import torch
from cli import ROOT, fairseq, tail
from meta_format import Meta

WATCHING = str(Path(__file__).parent / "watching_user_dir")


def convert(*words):
    """Run `python -m fairseq_tutel convert`; return what it printed."""
    command = [sys.executable, "-m", "fairseq_tutel", "convert", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, tail(done.stderr)
    return done.stdout


def words_of(data, language):
    """Return the size of a dictionary: fairseq pads it to a multiple of 8."""
    lines = len((data / f"dict{language}.txt").read_text().splitlines())
    return (lines + 4 + 7) // 8 * 8


def equals_meta_s_layer(meta, path):
    """Compare what layers made with Meta's layer by loops, for tokens that are no padding."""
    dropped = 0
    for name, x_TBD, mask, y_TBD in torch.load(path):
        layer = name.removesuffix(".fc1")
        x, y = (tensor.transpose(0, 1).reshape(-1, meta_format.D) for tensor in (x_TBD, y_TBD))
        real = torch.ones(len(x), dtype=bool) if mask is None else ~mask.reshape(-1)
        expected, count = meta_format.layer_by_loops(meta, layer, x[real])
        torch.testing.assert_close(y[real], expected, rtol=1e-5, atol=1e-5, msg=name)
        dropped += count
    return dropped


LANGUAGE_MODELS = {
    "top-2": ({}, True),
    "top-2, normalised before dropping, relu": (
        {
            "options": {
                "moe_normalize_gate_prob_before_dropping": True,
                "activation_fn": "relu",
                "moe_eval_capacity_token_fraction": -1.0,
            }
        },
        True,
    ),
    "top-1 of two experts on four ranks, from args": (
        {
            "num_experts": 2,
            "ranks": 4,
            "moe_freq": 2,
            "args_alone": True,
            "options": {"moe_top1_expert": True, "moe_eval_capacity_token_fraction": 0.4},
        },
        True,
    ),
}


@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_convert_of_meta_s_language_models_evaluates_as_meta_s_layer(case, lm_data, tmp_path):
    fields, drops = LANGUAGE_MODELS[case]
    meta = Meta(words_of(lm_data, ""), **fields)
    meta_format.write(meta, tmp_path / "checkpoint_best")
    print(convert("meta", "--input", tmp_path / "checkpoint_best.pt", "--output", tmp_path / "ours.pt"))
    watched = tmp_path / "watched.pt"
    run = fairseq(
        "eval-lm", lm_data, "--user-dir", WATCHING, "--path", tmp_path / "ours.pt", "--gen-subset",
        "valid", "--tokens-per-sample", 16, "--batch-size", 2, env={"WATCHED": str(watched)},
    )  # fmt: skip
    assert "Perplexity" in run.output
    dropped = equals_meta_s_layer(meta, watched)
    assert (dropped > 0) == drops


def test_convert_of_meta_s_translation_model_translates_as_meta_s_layer(mt_data, tmp_path):
    options = {"moe_eval_capacity_token_fraction": 1.0, "use_moe_pad_mask": True}
    meta = Meta(words_of(mt_data, ".en"), translates=True, options=options)
    meta_format.write(meta, tmp_path / "model")
    convert("meta", "--input", tmp_path / "model", "--output", tmp_path / "ours.pt")
    watched = tmp_path / "watched.pt"
    run = fairseq(
        "generate", mt_data, "--user-dir", WATCHING, "--path", tmp_path / "ours.pt", "--beam", 2,
        "--max-len-b", 5, "--max-tokens", 60, env={"WATCHED": str(watched)},
    )  # fmt: skip
    assert "H-0" in run.output
    assert equals_meta_s_layer(meta, watched) == 0
