"""Half precision through the command line: --bf16, memory-efficient, fp16 Adam moments, fp16."""

import re

import pytest
import torch
from cli import USER_DIR, fairseq
from equality import same_bits
from models import lm_args, mt_args

ON_GPU = {
    "fp32": (),
    "fp16": ("--fp16",),
    "memory-efficient fp16": ("--memory-efficient-fp16",),
    "bf16": ("--bf16",),
    "memory-efficient fp16, fp16 Adam stats": ("--memory-efficient-fp16", "--fp16-adam-stats"),
    "fp16, fp16 Adam stats": ("--fp16", "--fp16-adam-stats"),
    "bf16, masters in host memory": ("--bf16", "--moe-offload-optimizer"),
    "bf16, experts on two GPUs": ("--bf16", "--moe-expert-parallel-size", 2),
}


def _train(data, folder, *flags, updates=4, ranks=1):
    """Train on two micro-batches per update, whatever the number of ranks."""
    args = lm_args(data, folder, "--update-freq", 2 // ranks, "--cpu", *flags, updates=updates)
    return fairseq("train", *args, ranks=ranks)


def _load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


def test_bf16_with_fp16_moments_trains_like_fp32_and_resumes_bit_for_bit(lm_data, tmp_path):
    flags = ("--bf16", "--fp16-adam-stats")
    losses = [
        [float(s["nll_loss"]) for s in run.stats("train_inner")]
        for run in (_train(lm_data, tmp_path / "fp32"), _train(lm_data, tmp_path / "a", *flags, ranks=2))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    for updates in (2, 4):
        _train(lm_data, tmp_path / "b", *flags, updates=updates, ranks=2)
    a, b = _load(tmp_path / "a"), _load(tmp_path / "b")
    same_bits(a["model"], b["model"])
    same_bits(a["last_optimizer_state"]["state"], b["last_optimizer_state"]["state"])


def _translation(data, folder, *flags, updates=6, ranks=1):
    args = mt_args(data, folder, "--update-freq", 2 // ranks, *flags, updates=updates)
    return fairseq("train", *args, ranks=ranks)


@pytest.fixture(scope="module")
def fp32_translation(mt_data, tmp_path_factory):
    """A fp32 run. It also tests that --cpu and clipping work on a machine with a GPU."""
    run = _translation(mt_data, tmp_path_factory.mktemp("fp32-mt"), "--cpu")
    assert float(run.stats("train_inner")[-1]["gnorm"]) > 0.5
    return run


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ON_GPU)
def test_a_gpu_precision_trains_clips_validates_resumes_and_generates(
    precision, mt_data, fp32_translation, tmp_path
):
    flags, ranks = ON_GPU[precision], 2 if "two GPUs" in precision else 1
    if torch.cuda.device_count() < ranks:
        pytest.skip("not run: each rank needs a GPU")
    if ranks == 1:  # by default, fairseq uses all GPUs of a machine
        flags = ("--distributed-world-size", 1, *flags)
    _translation(mt_data, tmp_path, *flags, updates=3, ranks=ranks)
    run = _translation(mt_data, tmp_path, *flags, ranks=ranks)
    for tag, loss, norm in (("train_inner", "nll_loss", "gnorm"), ("valid", "valid_nll_loss", None)):
        found, expected = run.stats(tag)[-1], fp32_translation.stats(tag)[-1]
        assert float(found[loss]) == pytest.approx(float(expected[loss]), rel=0.03)
        if norm:
            assert float(found[norm]) == pytest.approx(float(expected[norm]), rel=0.1)
    half = ("--fp16",) if "fp16" in precision else ()
    done = fairseq(
        "generate", mt_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt",
        "--task", "moe_translation", "--beam", 2, "--max-len-b", 8,
        "--required-batch-size-multiple", 1, *half,
    )  # fmt: skip
    assert len(re.findall(r"^H-", done.output, re.M)) == 21
