"""Commands with an expert store give the same output as with all experts in memory."""

import re

import pytest
from cli import USER_DIR, fairseq, refused, tail
from models import lm_args, mt_args
from tool_in_process import convert

SHARDED = ("--moe-checkpoint", "sharded")
LINE = r"^[HPS]-\d+\t.*$"
PREGATED = ("--moe-pregate", 1)
LAYERS, EXPERTS = 4, 4


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """A pre-gated translation model with little training, in a sharded checkpoint."""
    folder = tmp_path_factory.mktemp("mt-run")
    fairseq("train", *mt_args(mt_data, folder, *SHARDED, *PREGATED, updates=1))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """A language model in a full checkpoint."""
    folder = tmp_path_factory.mktemp("lm-run")
    fairseq("train", *lm_args(lm_data, folder, updates=2))
    return folder / "checkpoint_last.pt"


def words(task, data, path, *extra):
    return [
        data, "--user-dir", USER_DIR, "--task", f"moe_{task}", "--path", path, "--num-workers", 0,
        "--required-batch-size-multiple", 1, *extra,
    ]  # fmt: skip


GENERATE = ("--beam", 2, "--max-len-b", 8, "--batch-size", 7)


def generate(data, path, *extra, **options):
    """Run fairseq-generate; return the printed sentences, and the run."""
    run = fairseq("tutel-run", "generate", *words("translation", data, path, *GENERATE, *extra), **options)
    return sorted(re.findall(LINE, run.output, re.M)), run


@pytest.fixture(scope="module")
def resident(mt, mt_data):
    lines, run = generate(mt_data, mt)
    assert len(lines) > 60 and not run.stats("expert_store")
    return lines


@pytest.mark.parametrize(
    "extra",
    [
        ("pregated", "--moe-expert-cache", 3, "--moe-expert-cache-policy", "lru"),
        ("prefetch-all", "--moe-expert-tier", "host"),
    ],
    ids=lambda extra: extra[0],
)
def test_generate_prints_the_scores_of_resident(mt, mt_data, resident, extra):
    lines, run = generate(mt_data, mt, "--moe-expert-store", *extra)
    assert lines == resident
    (found,) = run.stats("expert_store")
    tier = "host" if "host" in extra else "disk"
    assert (found["policy"], found["tier"]) == (extra[0], tier)
    assert found["fetches"] > 0 and found["bytes"] > 0 and found["peak_experts"] <= LAYERS * EXPERTS


def scores_of(lines):
    return sorted(float(score) for score in re.findall(r"^H-\d+\t(\S+)", "\n".join(lines), re.M))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("half", [(), ("--fp16",), ("--moe-inference-dtype", "bf16")], ids=str)
def test_a_gpu_translates_with_experts_from_a_store(mt, mt_data, resident, half, tier):
    more = ("--moe-expert-store", "pregated", "--moe-expert-tier", tier, "--moe-expert-cache", 3)
    lines, run = generate(mt_data, mt, *more, *half, "--distributed-world-size", 1)
    assert scores_of(lines) == pytest.approx(scores_of(resident), abs=0.05)
    (found,) = run.stats("expert_store")
    assert found["fetches"] > 0


def test_two_ranks_multiply_quantized_experts_and_decoders(mt, mt_data, resident, tmp_path):
    convert("sharded", "--input", mt, "--output", tmp_path / "int8.pt", "--expert-dtype", "int8")
    flags = ("--moe-expert-parallel-size", 2, "--moe-expert-store", "on-demand")
    flags += ("--moe-inference-dtype", "int8")
    lines, run = generate(mt_data, tmp_path / "int8.pt", *flags, ranks=2)
    assert scores_of(lines) == pytest.approx(scores_of(resident), abs=0.05)
    (found,) = run.stats("expert_store")
    assert found["bytes"] / found["fetches"] < 2 * 2 * 16 * 32


SCORED = (
    "--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 9, "--output-word-probs",
)  # fmt: skip


def test_eval_lm_with_experts_in_host_memory_and_on_disk(lm, lm_data, tmp_path):
    convert("sharded", "--input", lm, "--output", tmp_path / "sharded.pt")
    ways = [(lm,), (lm, "host"), (tmp_path / "sharded.pt", "disk")]
    found = []
    for path, *tier in ways:
        store = ("--moe-expert-store", "on-demand", "--moe-expert-tier", *tier) if tier else ()
        run = fairseq("eval-lm", *words("language_modeling", lm_data, path, *SCORED, *store))
        found.append(re.findall(r"eval_lm \| (\d+ .*|Loss.*)$", run.output, re.M))
    assert len(found[0]) > 20 and found[0] == found[1] == found[2]
    refusal = refused(
        "eval-lm", *words("language_modeling", lm_data, lm, *SCORED, "--moe-expert-store", "on-demand")
    )
    assert "error: tier (--moe-expert-tier) is disk, but these experts" in tail(refusal, 3)
    assert "fairseq-tutel convert sharded" in refusal and "Traceback" not in refusal


def test_a_store_in_training_is_refused(lm_data, tmp_path):
    output = refused("train", *lm_args(lm_data, tmp_path, "--moe-expert-store", "on-demand"))
    assert "--moe-expert-store is on-demand, which is only for inference" in output
