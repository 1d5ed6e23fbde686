"""Converted checkpoints of Meta and Tutel give the outputs of Meta's and Tutel's MoE layers."""

import dataclasses
import math
from pathlib import Path

import meta_format
import torch
from cli import fairseq
from meta_format import D, Meta
from tool_in_process import convert

WATCHING = str(Path(__file__).parent / "watching_user_dir")


def words_of(data, language):
    """Return the vocabulary size of a dictionary, which fairseq pads to a multiple of 8."""
    lines = len((data / f"dict{language}.txt").read_text().splitlines())
    return (lines + 4 + 7) // 8 * 8


def evaluated(data, path, folder):
    """Evaluate a language model; return the file that records inputs and outputs of its MoE layers."""
    watched = folder / "watched.pt"
    run = fairseq(
        "eval-lm", data, "--user-dir", WATCHING, "--path", path, "--gen-subset", "valid",
        "--tokens-per-sample", 16, "--batch-size", 2, env={"WATCHED": str(watched)},
    )  # fmt: skip
    assert math.isfinite(float(run.output.split("Perplexity: ")[1].split()[0]))
    return watched


def equals_the_layer_by_loops(meta, path):
    """Compare the recorded outputs of tokens, but not of padding, with Meta's layer; return the number of
    dropped assignments."""
    dropped, calls = 0, torch.load(path)
    assert {name.removesuffix(".fc1") for name, *_ in calls} == set(meta.moe_layers())
    for name, x_TBD, mask, y_TBD in calls:
        x, y = (tensor.transpose(0, 1).reshape(-1, D) for tensor in (x_TBD, y_TBD))
        real = torch.ones(len(x), dtype=bool) if mask is None else ~mask.reshape(-1)
        expected, count = meta_format.layer_by_loops(
            meta, name.removesuffix(".fc1"), x[real], sentences=x_TBD.shape[1]
        )
        torch.testing.assert_close(y[real], expected, rtol=1e-5, atol=1e-5, msg=name)
        dropped += count
    return dropped


LANGUAGE_MODEL = {
    "moe_batch_prioritized_routing": True, "moe_normalize_gate_prob_before_dropping": True,
    "moe_eval_capacity_token_fraction": -1.0, "activation_fn": "relu", "moe_eom": 0.2, "moe_fom": 0.1,
    "moe_cmr": True, "cmr_gate_drop": 0.3,
}  # fmt: skip


def test_a_converted_language_model_of_meta_computes_the_outputs_of_meta_s_layer(lm_data, tmp_path):
    meta = Meta(words_of(lm_data, ""), options=LANGUAGE_MODEL)
    meta_format.write(meta, tmp_path / "best")
    convert("meta", "--input", tmp_path / "best.pt", "--output", tmp_path / "ours.pt")
    watched = evaluated(lm_data, tmp_path / "ours.pt", tmp_path)
    assert equals_the_layer_by_loops(meta, watched) > 0


def test_a_converted_translation_model_of_meta_computes_the_outputs_of_meta_s_layer(mt_data, tmp_path):
    options = {
        "moe_eval_capacity_token_fraction": 0.02, "moe_eval_capacity_max_seqlen": True,
        "use_moe_pad_mask": True,
    }  # fmt: skip
    words = words_of(mt_data, ".en")
    meta = Meta(words, translates=True, options=options)
    meta_format.write(meta, tmp_path / "model")
    convert("meta", "--input", tmp_path / "model", "--output", tmp_path / "ours.pt")
    watched = tmp_path / "watched.pt"
    run = fairseq(
        "generate", mt_data, "--user-dir", WATCHING, "--path", tmp_path / "ours.pt", "--beam", 2,
        "--max-len-b", 3, "--max-tokens", 60, env={"WATCHED": str(watched)},
    )  # fmt: skip
    assert "H-0" in run.output
    assert equals_the_layer_by_loops(meta, watched) > 0


def test_a_converted_model_of_tutel_s_fairseq_example_computes_the_outputs_of_tutel(lm_data, tmp_path):
    options = {"activation_fn": "gelu", "share_decoder_input_output_embed": True}
    meta = Meta(words_of(lm_data, ""), ranks=4, options=options)
    for rank in range(4):
        torch.save(meta_format.tutel_state(meta, rank), tmp_path / f"last-{rank}-of-4")
    words = ("--input-prefix", tmp_path / "last-", "--input-size", 4, "--output", tmp_path / "ours.pt")
    printed = convert("tutel", *words)
    assert "L_AUX_WT" in printed
    watched = evaluated(lm_data, tmp_path / "ours.pt", tmp_path)
    computed = {
        "activation_fn": "linear",  # experts of Tutel's example have no activation
        "moe_normalize_gate_prob_before_dropping": True,
        "moe_eval_capacity_token_fraction": 1.0,
    }
    assert equals_the_layer_by_loops(dataclasses.replace(meta, options=computed), watched) == 0
