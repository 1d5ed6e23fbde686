"""Bad input ends a command with one sentence that names the option, the value and the fix.

Every case is refused before the first update, through fairseq-train, and some through
fairseq-hydra-train.
"""

import pytest
from cli import HYDRA, ROOT, fairseq, refused
from models import lm_args, mt_args


# tests/moe/test_config.py and tests/plugin/test_install_experts.py have the other refusals.
def test_a_bad_option_is_refused_by_name(lm_data, tmp_path):
    output = refused("train", *lm_args(lm_data, tmp_path, "--moe-top-k", 5))
    assert "top_k (--moe-top-k) is 5 but there are 4 experts; choose a value from 1 to 4" in output
    assert "num_updates" not in output
    assert not list(tmp_path.iterdir())


def test_what_cannot_work_on_several_ranks_ends_each_of_them(lm_data, tmp_path):
    flags = ("--moe-expert-parallel-size", 2, "--moe-expert-count", 3)
    run = fairseq("train", *lm_args(lm_data, tmp_path, *flags), ranks=2, check=False)
    assert all(code not in (0, None) for code in run.exit_codes)
    # A rank that is a little late finds the connection closed by the one that said it first.
    assert "does not fit the number of ranks (2) and the number of experts (3); give 1, or 0" in run.output


def test_layerdrop_works_where_every_rank_has_all_experts(lm_data, tmp_path):
    flags = ("--decoder-layerdrop", 0.5, "--moe-expert-parallel-size", 1)
    assert "done training" in fairseq("train", *lm_args(lm_data, tmp_path, *flags), ranks=2).logs[0]


def test_expert_flags_with_a_dense_architecture_are_refused(lm_data, tmp_path):
    output = refused("train", *lm_args(lm_data, tmp_path, "--arch", "transformer_lm"))
    assert "--moe-freq was given with --arch transformer_lm, which is dense" in output
    assert "give --arch moe_transformer_lm, or remove the flag" in output


def test_a_moe_criterion_with_a_dense_architecture_is_refused(mt_data, tmp_path):
    words = mt_args(mt_data, tmp_path, "--arch", "transformer_iwslt_de_en")
    for flag in ("--moe-freq", "--moe-expert-count"):
        at = words.index(flag)
        del words[at : at + 2]
    output = refused("train", *words)
    assert "needs MoE layers, but the model has none" in output.splitlines()[-1]
    assert "num. shared model params" not in output


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.moe_top_k=9", "top_k (--moe-top-k) is 9 but there are 8 experts"),
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
