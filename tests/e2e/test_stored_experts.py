"""Commands that use a model whose experts are in a store: what they print with all experts in memory."""

import os
import re
import shutil

import pytest
import torch
from cli import USER_DIR, fairseq, refused, tail
from models import lm_args, mt_args
from tool_in_process import convert

import fairseq_tutel as ft
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.inference.quantized_linear import QuantizedLinear

SHARDED = ("--moe-checkpoint", "sharded")
LINE = r"^[HPS]-\d+\t.*$"
PREGATED = ("--moe-pregate", 1)
LAYERS, EXPERTS = 4, 4


@pytest.fixture(scope="module")
def mt(mt_data, tmp_path_factory):
    """A pre-gated translation model in shards; hardly trained."""
    folder = tmp_path_factory.mktemp("mt-run")
    fairseq("train", *mt_args(mt_data, folder, *SHARDED, *PREGATED, updates=1))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def lm(lm_data, tmp_path_factory):
    """A language model, in one file."""
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
    """Return what fairseq-generate printed of its sentences, and the run."""
    run = fairseq("tutel-run", "generate", *words("translation", data, path, *GENERATE, *extra), **options)
    return sorted(re.findall(LINE, run.output, re.M)), run


@pytest.fixture(scope="module")
def resident(mt, mt_data):
    lines, run = generate(mt_data, mt)
    assert len(lines) > 60 and not run.stats("expert_store")
    return lines


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(("on-demand",), marks=LONG),
        ("pregated", "--moe-expert-cache", 3, "--moe-expert-cache-policy", "lru"),
        pytest.param(("prefetch-all", "--moe-expert-tier", "host"), marks=LONG),
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


def test_two_ranks_share_the_experts_of_a_store(mt, mt_data, resident):
    shared = ("--moe-expert-parallel-size", 2)
    lines, run = generate(mt_data, mt, *shared, "--moe-expert-store", "pregated", ranks=2)
    scores = [sorted(float(score) for score in re.findall(r"^H-\d+\t(\S+)", "\n".join(found), re.M))
              for found in (lines, resident)]  # fmt: skip
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert "expert parallel size 2, replicas 1" in run.logs[0]
    (found,) = run.stats("expert_store")  # the first rank's
    assert found["peak_experts"] <= 2 * EXPERTS // 2


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


@LONG
@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_commands_multiply_quantized_experts(mt_data, tmp_path, packing):
    sizes = [
        f"--{side}-{name}" for side in ("encoder", "decoder") for name in ("embed-dim", "ffn-embed-dim")
    ]
    wide = [word for flag in sizes for word in (flag, 64)]
    fairseq("train", *mt_args(mt_data, tmp_path, *wide, updates=3))
    path = tmp_path / "quantized.pt"
    last = tmp_path / "checkpoint_last.pt"
    convert("sharded", "--input", last, "--output", path, "--expert-dtype", packing)
    store, two = ("--moe-expert-store", "on-demand"), ("--moe-expert-parallel-size", 2)
    unpacked, _ = generate(mt_data, path, *store, "--moe-expert-compute", "unpacked")
    assert generate(mt_data, path)[0] == unpacked
    for flags, ranks in (((), 1), (two, 2), (("--moe-inference-dtype", "bf16"), 1)):
        lines, _ = generate(mt_data, path, *store, *flags, ranks=ranks)
        assert scores_of(lines) == pytest.approx(scores_of(unpacked), abs=0.05)
    (tmp_path / "in.txt").write_text("w1 w3 w9\nw2\n")
    more = ("--input", tmp_path / "in.txt", "--beam", 2, "--max-len-b", 5, *store)
    for ranks, flags in ((1, ()), (2, two)):
        run = fairseq("tutel-run", "interactive", *words("translation", mt_data, path, *more, *flags),
                      ranks=ranks)  # fmt: skip
        assert len(re.findall(r"^H-", run.logs[0], re.M)) == 2
    for dtype in (torch.float32, torch.bfloat16):
        model = ft.from_checkpoint(path, mt_data, dtype=dtype, moe_expert_store="on-demand")
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.translate("w1 w3 w9", beam=2, max_len_b=5)


INT8 = [
    {"dtype": torch.int8},
    {"moe_inference_dtype": "int8"},
    {"dtype": torch.int8, "moe_inference_dtype": "auto"},
]


@pytest.mark.parametrize("how", INT8, ids=str)
def test_python_opens_a_model_with_a_decoder_in_int8(mt, mt_data, how):
    model = ft.from_checkpoint(mt, mt_data, moe_expert_store="on-demand", **how)
    decoder = model.models[0].decoder
    assert isinstance(decoder.output_projection, QuantizedLinear)
    assert not any(type(module) is torch.nn.Linear for module in decoder.modules())
    assert not any(isinstance(module, QuantizedLinear) for module in model.models[0].encoder.modules())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.translate("w1 w3 w9", beam=2, max_len_b=5)


def test_python_ignores_the_inference_dtype_of_the_training_run(mt, mt_data, tmp_path):
    saved = SavedModel.open(mt)
    saved.options_of("task")["moe_inference_dtype"] = "int8"
    saved.write(tmp_path / "saved.pt")
    for dtype in (torch.float32, torch.bfloat16):
        model = ft.from_checkpoint(tmp_path / "saved.pt", mt_data, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_models_of_an_ensemble_share_a_store_but_not_with_other_models(mt, mt_data):
    def stores(path):
        models = ft.from_checkpoint(path, mt_data, moe_expert_store="on-demand").models
        return {model.encoder.layers[0].fc1.experts.weights._store for model in models}

    found = [stores(mt), stores(mt), stores(f"{mt}:{mt}")]
    assert [len(each) for each in found] == [1] * 3 and len(set().union(*found)) == 3


@LONG
def test_an_ensemble_has_one_store(mt, mt_data):
    both = f"{mt}:{mt}"
    expected, _ = generate(mt_data, both)
    lines, run = generate(mt_data, both, "--moe-expert-store", "on-demand", "--moe-expert-cache", "1MB")
    assert lines == expected
    (found,) = run.stats("expert_store")
    assert 0 < found["fetches"] <= 2 * LAYERS * EXPERTS  # all of them are kept
    assert found["peak_experts"] == found["fetches"] and found["hits"] > 0


@LONG
@pytest.mark.parametrize("extra", [(), ("--fp16",)])
def test_interactive_prints_the_scores_of_resident(mt, mt_data, tmp_path, extra):
    (tmp_path / "in.txt").write_text("w1 w3 w9\nw2\n")
    more = ("--input", tmp_path / "in.txt", "--beam", 2, "--max-len-b", 5, *extra)
    stores = ((), ("--moe-expert-store", "pregated"))
    runs = [fairseq("interactive", *words("translation", mt_data, mt, *more, *store)) for store in stores]
    lines = [re.findall(LINE, run.output, re.M) for run in runs]
    assert len(lines[0]) == 6 and lines[0] == lines[1]
    assert runs[1].stats("expert_store")[0]["fetches"] > 0


SCORED = (
    "--gen-subset", "valid", "--tokens-per-sample", 16, "--batch-size", 9, "--output-word-probs",
)  # fmt: skip


def test_eval_lm_takes_a_full_checkpoint_from_host_memory_and_shards_from_disk(lm, lm_data, tmp_path):
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


@LONG
def test_validate_gives_the_loss_of_resident(mt, mt_data):
    more = words("translation", mt_data, mt, "--batch-size", 9, "--log-format", "json")
    expected = fairseq("validate", *more).stats("valid")
    run = fairseq("validate", *more, "--moe-expert-store", "prefetch-all")
    found = run.stats("valid")
    assert [each["valid_loss"] for each in found] == [each["valid_loss"] for each in expected]
    assert run.stats("expert_store")[0]["policy"] == "prefetch-all"


def test_a_file_that_was_cut_short_ends_the_command_with_one_sentence(mt, mt_data, tmp_path):
    shutil.copytree(mt.parent, tmp_path / "torn")
    for file in sorted((tmp_path / "torn" / "experts").rglob("*.safetensors")):
        os.truncate(file, 1000)
    more = words("translation", mt_data, tmp_path / "torn" / mt.name, *GENERATE)
    output = refused("tutel-run", "generate", *more, "--moe-expert-store", "pregated")
    assert re.search(r"^error: .*experts in .*, which is corrupt or missing", output, re.M), tail(output)
    assert "Traceback" not in output


@pytest.mark.parametrize("policy", ["on-demand", pytest.param("pregated", marks=LONG)])
def test_a_store_without_a_use_is_refused(lm, lm_data, tmp_path, policy):
    if policy == "pregated":
        more = words("language_modeling", lm_data, lm, *SCORED, "--moe-expert-store", policy)
        assert "but this model has no pre-gating" in refused("eval-lm", *more)
        return
    output = refused("train", *lm_args(lm_data, tmp_path, "--moe-expert-store", policy))
    assert "--moe-expert-store is on-demand, which is only for inference" in output
    assert "Traceback" not in output
