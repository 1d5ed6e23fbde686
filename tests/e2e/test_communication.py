"""Options for communication do not change the trained model, and hydra accepts these options."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from cli import HYDRA, ROOT, fairseq
from equality import facts_of, same_weights
from models import lm_args

from fairseq_tutel.parallel.machine import typical
from fairseq_tutel.plans.files import write
from fairseq_tutel.plans.generators import make

TWO_EXPERTS = ("--moe-expert-count", 2, "--optimizer", "moe_sgd", "--lr", 0.05)
ALL_FOUR = ("--moe-expert-parallel-size", 4)


def train(data, folder, *extra, ranks=4, updates=4):
    flags = ("--update-freq", 4 // ranks, *extra)
    return fairseq("train", *lm_args(data, folder, *flags, updates=updates), ranks=ranks)


def loaded(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


def same_training(expected, got):
    assert facts_of(got) == pytest.approx(facts_of(expected), rel=1e-5, abs=1e-6)
    same_weights(expected["model"], got["model"], adam=False)


def test_two_nodes_with_row_chunks_and_torch_ddp_train_the_same_model_as_one_rank(lm_data, tmp_path):
    train(lm_data, tmp_path / "plain", *TWO_EXPERTS, ranks=1)
    flags = ("--moe-use-2dh", "--moe-local-size", 2, "--moe-a2a-ffn-overlap-degree", 2)
    user_dir = ("--user-dir", Path(__file__).parent / "torch_ddp_user_dir")
    run = train(lm_data, tmp_path, *TWO_EXPERTS, *ALL_FOUR, *flags, *user_dir)
    assert "in torch's DistributedDataParallel" in run.output
    same_training(loaded(tmp_path / "plain"), loaded(tmp_path))


def test_adaptive_strategies_do_not_change_the_trained_model(lm_data, tmp_path):
    plan = tmp_path / "hops.json"
    write(make("two_hops", "all_to_all", 4, nodes=2), plan)
    model = (*TWO_EXPERTS, "--disable-validation", "--save-interval", 100)
    flags = (
        *(*ALL_FOUR, "--moe-adaptive", "auto", "--moe-local-size", 2),
        *("--moe-collective-plans", plan),
    )
    train(lm_data, tmp_path / "plain", *model, ranks=1, updates=12)
    run = train(lm_data, tmp_path, *model, *flags, updates=12)
    (count,) = re.findall(r"measuring (\d+) strategies", run.output)
    assert int(count) > 4
    same_training(loaded(tmp_path / "plain"), loaded(tmp_path))


def test_hydra_accepts_every_communication_option(lm_data, tmp_path):
    profile = dataclasses.asdict(typical(None)) | {"name": "this one"}
    (tmp_path / "machine.json").write_text(json.dumps(profile))
    keys = (
        f"moe_machine_file={tmp_path}/machine.json",
        "moe_expert_parallel_size=2", "moe_a2a_ffn_overlap_degree=3", "moe_parallel_type=model",
        "moe_adaptive_r=0", "moe_a2a_dtype=bf16", "moe_a2a_algorithm=auto", "moe_adaptive=auto",
        "moe_adaptive_window=64", "moe_local_size=1",
        "moe_checkpoint=sharded",
    )  # fmt: skip
    run = fairseq(
        "tutel-train", "--config-dir", HYDRA, "--config-name", "tiny_lm",
        f"task.data={lm_data}", f"checkpoint.save_dir={tmp_path}", "model.moe_expert_count=1",
        "model.moe_top_k=1", "model.decoder_layers=2", "optimization.max_update=1",
        "dataset.num_workers=0", "dataset.required_batch_size_multiple=1",
        *(f"+task.{key}" for key in keys),
        env={"PWD": str(ROOT)}, ranks=2,
    )  # fmt: skip
    assert "Strategy(adaptive_r=0, overlap=3, algorithm='linear')" in run.output
    assert "--moe-a2a-algorithm auto: chose linear from the hardware profile of this one" in run.output
    assert list((tmp_path / "experts").glob("*/*.slice-1-of-2.safetensors"))
