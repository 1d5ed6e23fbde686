"""Runs the command lines of the README of Meta's fairseq-moe with small models.

The tests omit the flag for Meta's sharded DDP backend, and on a CPU the flags for half precision.
"""

import shlex

import pytest
import torch
from cli import USER_DIR, fairseq
from models import lm_args

TRAIN = """
  --memory-efficient-fp16 --checkpoint-activations
  --task dummy_lm --tokens-per-sample 2048
  --arch moe_transformer_lm_gpt --share-decoder-input-output-embed
  --decoder-layers 24 --decoder-embed-dim 2048 --decoder-ffn-embed-dim 8192
  --decoder-attention-heads 32
  --moe-expert-count 8 --moe-freq 2
  --moe-gating-use-fp32 --moe-second-expert-policy all
  --moe-normalize-expert-grad sqrt_world_size
  --moe-eval-capacity-token-fraction -1.0
  --max-sentences-valid 1 --num-workers-valid 0
  --criterion moe_cross_entropy --moe-gate-loss-wt 0.01 --moe-gate-loss-combine-method sum
  --optimizer adam --fp16-adam-stats --adam-betas '(0.9, 0.98)' --clip-norm 0.0
  --lr 0.0005 --warmup-updates 750
  --dropout 0.1 --attention-dropout 0.1
  --batch-size 4 --update-freq 1
  --max-update 250 --disable-validation
  --log-format json --log-interval 10
"""
SMALL = """
  --dict-size 60 --dataset-size 64 --tokens-per-sample 16 --decoder-layers 2 --decoder-embed-dim 16
  --decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
  --max-update 4 --log-interval 1 --num-workers 0 --no-save --lr 0.01 --warmup-updates 1
"""
EVALUATE = """
  --gen-subset valid --sample-break-mode none --tokens-per-sample 2048 --batch-size 1 --output-word-probs
  --is-moe --distributed-world-size 1
  --model-overrides "{'world_size': 1, 'moe_eval_capacity_token_fraction': 0.05}"
"""


@pytest.mark.parametrize("dtype", ["full", pytest.param("half", marks=pytest.mark.gpu)])
def test_the_training_command_of_meta_s_readme_runs(dtype):
    half = () if dtype == "half" else ("--memory-efficient-fp16", "--fp16-adam-stats")
    words = [word for word in shlex.split(TRAIN) if word not in half]
    ranks = min(2, torch.cuda.device_count() or 2)
    run = fairseq("train", "--user-dir", USER_DIR, *words, *shlex.split(SMALL), ranks=ranks)
    records = run.stats("train_inner")
    assert len(records) == 4
    assert float(records[-1]["loss"]) < float(records[0]["loss"])
    assert float(records[0]["overflow_expert2"]) == 0  # by default, the plugin drops no assignment
    assert "8 experts, top-2, hidden 32" in run.output
    assert "(evaluation as in training)" in run.output


def perplexity(run):
    return float(run.output.split("Perplexity: ")[1].split()[0])


def test_the_evaluation_command_of_meta_s_readme_drops_assignments(lm_data, tmp_path):
    fairseq("train", *lm_args(lm_data, tmp_path, "--disable-validation", updates=2))
    words = (
        lm_data, "--user-dir", USER_DIR, "--path", tmp_path / "checkpoint_last.pt", "--num-workers", 0,
        "--required-batch-size-multiple", 1,
    )  # fmt: skip
    run = fairseq("eval-lm", *words, *shlex.split(EVALUATE), "--tokens-per-sample", 16)
    assert "--is-moe is not needed" in run.output
    dropless = fairseq("eval-lm", *words, "--gen-subset", "valid", "--tokens-per-sample", 16)
    assert perplexity(run) != pytest.approx(perplexity(dropless), rel=1e-3)
