"""With --store-ema, a checkpoint has the moving average of all experts, for any number of ranks."""

import re
from pathlib import Path

import pytest
import torch
from cli import USER_DIR, fairseq
from equality import same_bits
from models import lm_args
from tool_in_process import convert, tool

from fairseq_tutel.checkpoint.shards import bind, is_record, unbind

LAST = "checkpoint_last.pt"

DECAY = 0.75  # fp32 represents 0.75 exactly
AVERAGED = ("--store-ema", "--ema-decay", DECAY, "--save-interval-updates", 1, "--disable-validation")
SHARDED = ("--moe-checkpoint", "sharded")
WIDE = ("--bf16", "--ema-fp32")
# Each test case is a list of runs (ranks, last update, flags), and the flags of all runs.
CASES = {
    "full": ([(2, 2, ()), (1, 3, ())], ()),
    "sharded, bf16": ([(1, 2, SHARDED), (2, 4, (*SHARDED, "--moe-save-async"))], WIDE),
    "expert shards, bf16": (
        [(4, 2, SHARDED), (2, 3, ()), (4, 4, ()), (1, 5, SHARDED)],
        (*WIDE, "--moe-expert-count", 2, "--moe-expert-parallel-size", "{most}"),
    ),
    "replicas": (
        [
            (2, 3, SHARDED),
            (4, 5, (*SHARDED, "--moe-expert-parallel-size", 2, "--moe-zero-stage", 1)),
            (3, 6, ("--moe-zero-stage", 2)),
        ],
        (),
    ),
}
LONG = ("expert shards, bf16", "replicas")


def _load(path):
    state = torch.load(path, weights_only=False)
    bind(state, Path(path))
    unbind(state)
    return state


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES]
)
def test_the_saved_average_is_the_moving_average_of_the_saved_weights(lm_data, tmp_path, case):
    starts, flags = CASES[case]
    for ranks, updates, own in starts:
        filled = [str(flag).format(most=min(ranks, 4)) for flag in flags]
        words = (*AVERAGED, "--moe-micro-batches", 4, *filled, *own)
        fairseq("train", *lm_args(lm_data, tmp_path, *words, updates=updates), ranks=ranks)
    saved = [_load(tmp_path / f"checkpoint_1_{update}.pt") for update in range(1, updates + 1)]
    # After update 1, the average equals the weights.
    average = {key: value.float() for key, value in saved[0]["model"].items()}
    for state in saved:
        extra = state["extra_state"]
        wide = "--ema-fp32" in flags
        found = extra["ema_fp32_params"] if wide else extra["ema"]
        assert ("ema_fp32_params" in extra) == wide
        assert found.keys() == average.keys()
        for key, weight in state["model"].items():
            is_number = weight.is_floating_point() and "version" not in key
            expected = DECAY * average[key] + (1 - DECAY) * weight if is_number else weight
            torch.testing.assert_close(found[key].float(), expected.float(), rtol=0, atol=1e-6, msg=key)
            rounded = expected.to(extra["ema"][key].dtype)
            torch.testing.assert_close(extra["ema"][key], rounded, rtol=1e-2 if wide else 0, atol=1e-6)
            average[key] = found[key].float()
    moved = saved[-1]["model"]["decoder.layers.0.fc1.experts.fc1_weight"].float()
    assert not torch.allclose(average["decoder.layers.0.fc1.experts.fc1_weight"], moved, atol=1e-4)


def test_convert_and_average_read_a_moving_average_that_started_in_a_resumed_run(lm_data, tmp_path):
    """A moving average with a decay of 1 does not change after its start."""
    saved, full, again = (tmp_path / name for name in ("saved", "full", "again"))
    full.mkdir()
    again.mkdir()
    words = (*SHARDED, "--disable-validation", "--save-interval-updates", 2)
    fairseq("train", *lm_args(lm_data, saved, *words, updates=2))
    words = (*words, "--store-ema", "--ema-decay", 1.0, "--ema-fp32")
    fairseq("train", *lm_args(lm_data, saved, *words, updates=3), ranks=2)
    expected = _load(saved / LAST)["extra_state"]
    same_bits(dict(_load(saved / "checkpoint_1_2.pt")["model"]), dict(expected["ema_fp32_params"]))
    convert("full", saved / LAST, "--output", full / LAST)
    convert("sharded", full / LAST, "--output", again / LAST)
    for folder in (full, again):
        written = torch.load(folder / LAST, weights_only=False)["extra_state"]
        found = _load(folder / LAST)["extra_state"]
        for name in ("ema", "ema_fp32_params"):
            same_bits(dict(expected[name]), dict(found[name]))
            experts = [value for key, value in written[name].items() if ".experts." in key]
            assert experts and all(is_record(value) == (folder == again) for value in experts)
    average = saved / "ema.pt"
    tool("average", saved / LAST, "--ema", "--output", average)
    same_bits(dict(expected["ema_fp32_params"]), dict(torch.load(average, weights_only=False)["model"]))
    run = fairseq(
        "eval-lm", lm_data, "--user-dir", USER_DIR, "--tokens-per-sample", 16, "--path", average
    )  # fmt: skip
    assert re.search(r"Loss \(base 2\): [\d.]+", run.output)
