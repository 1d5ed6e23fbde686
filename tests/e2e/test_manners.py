"""If a command fails, the last line of the output is one error sentence."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from cli import HYDRA, ROOT, refused
from models import lm_args

SPAWNING_DIR = str(pathlib.Path(__file__).parent / "spawning_user_dir")


def test_the_last_line_of_a_failed_command_names_a_bad_option_or_missing_data(lm_data, tmp_path):
    last = refused("train", *lm_args(lm_data, tmp_path, "--moe-top-k", 5)).strip().splitlines()[-1]
    assert re.match(r"error: .*--moe-top-k\) is 5", last)
    assert not list(tmp_path.iterdir())
    last = refused("train", *lm_args(tmp_path / "nowhere", tmp_path)).strip().splitlines()[-1]
    assert re.match("error: .*nowhere/dict.txt does not exist", last)


def test_hydra_names_a_bad_option_in_the_last_line(lm_data, tmp_path):
    output = refused(
        "hydra-train", "--config-dir", HYDRA, "--config-name", "tiny_lm", f"task.data={lm_data}",
        f"checkpoint.save_dir={tmp_path}", "model.moe_top_k=9", env={"PWD": str(ROOT)},
    )  # fmt: skip
    assert re.match(r"error: .*--moe-top-k\) is 9", output.strip().splitlines()[-1])


FAILURES = {
    "option": (("--moe-top-k", 5), "top_k (--moe-top-k) is 5, but a token can choose from 4 experts"),
    "data": ((), "nowhere/dict.txt does not exist"),
    "checkpoint": (("--restore-file", "bad.pt"), "--restore-file is bad.pt, which"),
    "nan": (("--lr", "1e30", "--clip-norm", "0"), "NaN"),
    "disk": (("--save-dir", "/proc/nowhere"), "/proc/nowhere"),
}


@pytest.mark.long
@pytest.mark.parametrize("spawned", [False, True], ids=["one process", "two spawned ranks"])
@pytest.mark.parametrize("failure", FAILURES)
def test_the_last_line_of_stderr_after_a_failure_is_one_error_sentence(failure, spawned, lm_data, tmp_path):
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
    assert "Traceback" not in done.stderr
    assert torch.cuda.device_count() > 1 or not spawned or "distributed init (rank 1)" in done.stdout
