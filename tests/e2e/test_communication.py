"""Every strategy of row exchange and of expert parallelism trains the same model."""

import dataclasses
import json
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
IN_TWO_SLICES = ("--moe-expert-count", 1, "--moe-top-k", 1, "--moe-expert-parallel-size", 2)
WAYS = {
    "over two nodes, in chunks, in torch's DDP": (
        *ALL_FOUR, "--moe-use-2dh", "--moe-local-size", 2, "--moe-a2a-ffn-overlap-degree", 2,
        "--user-dir", Path(__file__).parent / "torch_ddp_user_dir",
    ),
    "model, padded": (
        *ALL_FOUR, "--moe-parallel-type", "model", "--moe-exchange", "padded",
        "--moe-a2a-algorithm", "auto",
    ),
}  # fmt: skip


def train(data, folder, *extra, ranks=4, updates=4):
    flags = ("--update-freq", 4 // ranks, *extra)
    return fairseq("train", *lm_args(data, folder, *flags, updates=16), ranks=ranks)


def loaded(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


@pytest.fixture(scope="module")
def plain(lm_data, tmp_path_factory):
    """The same training on one rank."""
    folder = tmp_path_factory.mktemp("plain")
    train(lm_data, folder, *TWO_EXPERTS, ranks=1)
    return loaded(folder)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_the_same_model(way, plain, lm_data, tmp_path):
    run = train(lm_data, tmp_path, *TWO_EXPERTS, *WAYS[way])
    assert ("in torch's DistributedDataParallel" in run.output) == ("DDP" in way)
    got = loaded(tmp_path)
    assert facts_of(got) == pytest.approx(facts_of(plain), rel=1e-5, abs=1e-6)
    same_weights(plain["model"], got["model"], adam=False)


def test_a_tuner_changes_the_strategy_and_not_the_model(lm_data, tmp_path):
    plan = tmp_path / "hops.json"
    write(make("two_hops", "all_to_all", 4, nodes=2), plan)
    model = (*TWO_EXPERTS, "--disable-validation", "--save-interval", 100)
    flags = (
        *(*ALL_FOUR, "--moe-adaptive", "auto", "--moe-local-size", 2),
        *("--moe-collective-plans", plan),
    )
    train(lm_data, tmp_path / "plain", *model, ranks=1, updates=16)
    run = train(lm_data, tmp_path, *model, *flags, updates=16)
    assert "slowest of" in run.output  # it has settled, after more than one strategy
    expected, got = loaded(tmp_path / "plain"), loaded(tmp_path)
    assert facts_of(got) == pytest.approx(facts_of(expected), rel=1e-5, abs=1e-6)
    same_weights(expected["model"], got["model"], adam=False)


def test_slices_are_saved_as_whole_experts_and_resumed_on_any_ranks(lm_data, tmp_path):
    """Four updates in one go, and with stops at which everything changes."""
    whole = ("--moe-expert-count", 1, "--moe-top-k", 1)
    train(lm_data, tmp_path / "whole", *whole, ranks=1, updates=4)
    train(lm_data, tmp_path, *IN_TWO_SLICES, "--moe-parallel-type", "model", ranks=2, updates=2)
    train(lm_data, tmp_path, *whole, ranks=1, updates=3)
    run = train(lm_data, tmp_path, *IN_TWO_SLICES, "--moe-adaptive-r", 0, ranks=2, updates=4)
    assert "| ERROR |" not in run.output
    expected, got = loaded(tmp_path / "whole"), loaded(tmp_path)
    same_weights(expected["model"], got["model"], adam=True)
    moments = expected["last_optimizer_state"]["state"]
    for index, state in got["last_optimizer_state"]["state"].items():
        assert state["exp_avg_sq"].shape == moments[index]["exp_avg_sq"].shape


def test_every_option_goes_through_hydra(lm_data, tmp_path):
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
