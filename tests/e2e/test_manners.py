"""What a command prints on a terminal: right counts, no warnings of others, the error on the last line."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from cli import ROOT, fairseq, refused
from models import dense_lm_args, lm_args

SHORT = ("--no-save", "--disable-validation")
SPAWNING_DIR = str(pathlib.Path(__file__).parent / "spawning_user_dir")
COUNTS = re.compile(r"\| fairseq_cli.train \| num. (shared|expert) model params: ([\d,]+) \(.*: ([\d,]+)\)")


def counts(run):
    """Return the numbers of parameters in rank 0's log lines of fairseq-train: (all, trained)."""
    return {name: (total, trained) for name, total, trained in COUNTS.findall(run.logs[0])}


def test_the_parameters_of_experts_are_counted_and_others_warn_of_nothing(lm_data, tmp_path):
    words = lm_args(lm_data, tmp_path, *SHORT, updates=1)
    alone, both = (fairseq("train", *words, ranks=ranks) for ranks in (1, 2))
    D, H, E = 16, 32, 4
    experts = f"{2 * E * (2 * D * H + D + H):,}"
    assert counts(alone)["expert"] == (experts, experts)
    assert counts(alone) == counts(both)
    dense = fairseq("train", *dense_lm_args(lm_data, tmp_path, *SHORT, updates=1))
    assert counts(dense)["expert"] == ("0", "0") and counts(dense)["shared"][0] > "0"
    for run in (alone, both, dense):
        assert "Warning" not in run.output


def test_missing_data_and_a_misspelt_flag_are_named_on_the_last_line(lm_data, tmp_path):
    lines = refused("train", *lm_args(tmp_path / "nowhere", tmp_path)).strip().splitlines()
    assert re.match("error: the data file .*nowhere/dict.txt does not exist; give", lines[-1])
    lines = refused("train", *lm_args(lm_data, tmp_path, "--moe-topk", 1)).strip().splitlines()
    assert lines[-1] == "error: --moe-topk is not a known flag; did you mean --moe-top-k?"
    assert "unrecognized arguments: --moe-topk" in lines[-2]


FAILURES = {
    "option": (("--moe-top-k", 5), "top_k (--moe-top-k) is 5 but there are 4 experts"),
    "data": ((), "nowhere/dict.txt does not exist"),
    "checkpoint": (("--restore-file", "bad.pt"), "--restore-file is bad.pt, which"),
    "nan": (("--lr", "1e30", "--clip-norm", "0"), "NaN"),
    "disk": (("--save-dir", "/proc/nowhere"), "/proc/nowhere"),
}


@pytest.mark.long
@pytest.mark.parametrize("spawned", [False, True], ids=["one process", "two spawned ranks"])
@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_ends_with_one_sentence_on_stderr(failure, spawned, lm_data, tmp_path):
    flags, wanted = FAILURES[failure]
    data = tmp_path / "nowhere" if failure == "data" else lm_data
    (tmp_path / "bad.pt").write_bytes(b"not a checkpoint")
    if spawned:
        flags = ("--user-dir", SPAWNING_DIR, "--cpu", "--distributed-world-size", 2, *flags)
        flags = ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", *flags)
    words = [str(word) for word in lm_args(data, tmp_path / "save", *flags)]
    done = subprocess.run(
        [shutil.which("fairseq-train", path=os.path.dirname(sys.executable)), *words],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode not in (0, None)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and wanted in last, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert torch.cuda.device_count() > 1 or not spawned or "distributed init (rank 1)" in done.stdout
