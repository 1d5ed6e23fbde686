"""Bad input ends a command with one sentence that names the option, the value and the fix.

Every case is refused before the first update, through fairseq-train, and some through
fairseq-hydra-train.
"""

import pytest
from cli import HYDRA, ROOT, fairseq, refused
from models import lm_args, mt_args

LM_CASES = {
    "explicit P that does not divide": (
        ("--moe-expert-parallel-size", 3),
        "--moe-expert-parallel-size is 3, which does not fit the number of ranks (1)",
    ),
    "more choices than experts": (
        ("--moe-top-k", 5),
        "top_k (--moe-top-k) is 5 but there are 4 experts; choose a value from 1 to 4",
    ),
    "no experts": (("--moe-expert-count", 0), "--moe-expert-count is '0'; give a number of experts"),
    "negative experts": (("--moe-expert-count=-2",), "--moe-expert-count is '-2'; give a number"),
    "experts that no memory holds": (
        ("--moe-expert-count", 10**12),
        "--moe-expert-count 1000000000000 of --moe-expert-ffn-dim 32 makes 8,192,000 GB of weights",
    ),
    "counts for another number of layers": (
        ("--moe-expert-count", "4,4,4"),
        "--moe-expert-count is '4,4,4', 3 numbers for 2 MoE layers; give one number or 2",
    ),
    "frequency beyond the layers": (
        ("--moe-freq", 3),
        "no layer becomes a MoE layer (2 decoder layers, --moe-freq 3); set --moe-freq to at least 1",
    ),
    "frequency zero": (("--moe-freq", 0), "no layer becomes a MoE layer"),
    "one expert and four": (
        ("--moe-top1-expert", "--moe-top-k", 4),
        "--moe-top1-expert and --moe-top-k 4 are both given; drop one of them",
    ),
    "fp32 gate on and off": (
        ("--moe-gating-use-fp32", "--no-moe-gating-use-fp32"),
        "--moe-gating-use-fp32 and --no-moe-gating-use-fp32 are both given; drop one",
    ),
    "sharded backend": (
        ("--ddp-backend", "slowmo"),
        "--ddp-backend is slowmo, which would shard or average experts as if they were replicas",
    ),
    "fp16 on a CPU": (("--fp16",), "--fp16 is set on a CPU, where fairseq's fp16 needs a GPU; drop"),
    "a folder as restore file": (
        ("--restore-file", HYDRA),
        f"--restore-file is {HYDRA}, which is a folder; give a checkpoint file",
    ),
    "a missing restore file": (
        ("--restore-file", "nowhere.pt"),
        "--restore-file is nowhere.pt, which does not exist; give a path from the current folder",
    ),
    "quantization noise": (
        ("--quant-noise-pq", 0.1),
        "--quant-noise-pq is 0.1: quantization noise does not reach experts; set it to 0",
    ),
    "BASE layers": (("--base-layers", 1), "--base-layers is 1: BASE layers are another kind"),
    "pre-gating over more layers than there are": (
        ("--moe-pregate", 2),
        "pregate (--moe-pregate) is 2 but the decoder has 2 MoE layers; give 1 to 1",
    ),
    "pre-gating and activation checkpoints": (
        ("--moe-pregate", 1, "--checkpoint-activations"),
        "--moe-pregate is 1 and --checkpoint-activations is set, which recomputes a layer",
    ),
    "pre-gating and layerdrop": (
        ("--moe-pregate", 1, "--decoder-layerdrop", 0.1),
        "--decoder-layerdrop is 0.1: --moe-pregate 1 lets a layer's gate read the input of another",
    ),
}  # fmt: skip


# tests/moe/test_config.py has every value that an option refuses by itself.
@pytest.mark.parametrize("case", LM_CASES)
def test_a_bad_option_is_refused_by_name(case, lm_data, tmp_path):
    flags, sentence = LM_CASES[case]
    output = refused("train", *lm_args(lm_data, tmp_path, *flags))
    assert sentence in output
    assert "num_updates" not in output
    assert not list(tmp_path.iterdir())


RANK_CASES = {
    "P that does not divide the experts": (
        ("--moe-expert-parallel-size", 2, "--moe-expert-count", 3),
        "does not fit the number of ranks (2) and the number of experts (3); give a common divisor, a",
    ),
    "layerdrop": (
        ("--decoder-layerdrop", 0.2),
        "--decoder-layerdrop is 0.2: ranks would drop different layers",
    ),
    "optimizer that looks at all experts": (
        ("--optimizer", "moe_adafactor"),
        "--optimizer is moe_adafactor, whose updates depend on all experts of a layer at once",
    ),
    "moving average": (("--store-ema",), "--store-ema is set on several ranks"),
}


@pytest.mark.parametrize("case", RANK_CASES)
def test_what_cannot_work_on_several_ranks_ends_each_of_them(case, lm_data, tmp_path):
    flags, sentence = RANK_CASES[case]
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags), ranks=2, check=False)
    assert all(code not in (0, None) for code in run.exit_codes)
    # A rank that is a little late finds the connection closed by the one that said it first.
    assert sentence in run.output


def test_layerdrop_works_where_every_rank_has_all_experts(lm_data, tmp_path):
    flags = ("--decoder-layerdrop", 0.5, "--moe-expert-parallel-size", 1)
    assert "done training" in fairseq("train", *lm_args(lm_data, tmp_path, *flags), ranks=2).logs[0]


def test_expert_flags_with_a_dense_architecture_are_refused(lm_data, tmp_path):
    refused("train", *lm_args(lm_data, tmp_path, "--arch=transformer_lm"))
    output = refused("train", *lm_args(lm_data, tmp_path, "--arch", "transformer_lm"))
    assert "--moe-freq was given with --arch transformer_lm, which is dense" in output
    assert "choose --arch moe_transformer_lm or drop the flag" in output


def test_a_moe_criterion_with_a_dense_architecture_is_refused(mt_data, tmp_path):
    words = mt_args(mt_data, tmp_path, "--arch", "transformer_iwslt_de_en")
    for flag in ("--moe-freq", "--moe-expert-count"):
        at = words.index(flag)
        del words[at : at + 2]
    output = refused("train", *words)
    assert "needs MoE layers, and the model has none" in output.splitlines()[-1]
    assert "num. shared model params" not in output


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_frequency_of_one_side_is_refused_by_its_name(side, mt_data, tmp_path):
    output = refused("train", *mt_args(mt_data, tmp_path, f"--{side}-moe-freq=-3"))
    assert f"--{side}-moe-freq is -3; give a whole number of layers" in output


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.moe_top_k=9", "top_k (--moe-top-k) is 9 but there are 8 experts"),
        ("+task.moe_expert_parallel_size=5", "--moe-expert-parallel-size is 5"),
        ("+task.moe_exchange=carrier_pigeon", "moe_exchange"),
    ],
)
def test_hydra_refuses_the_same(override, sentence, lm_data, tmp_path):
    output = refused(
        "hydra-train", "--config-dir", HYDRA, "--config-name", "tiny_lm",
        f"task.data={lm_data}", f"checkpoint.save_dir={tmp_path}", override,
        env={"PWD": str(ROOT)},
    )  # fmt: skip
    assert sentence in output


def test_a_job_that_always_names_its_last_checkpoint_starts(lm_data, tmp_path):
    words = lm_args(lm_data, tmp_path, "--restore-file", tmp_path / "checkpoint_last.pt", updates=1)
    assert "done training" in fairseq("train", *words).output
