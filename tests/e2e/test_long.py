"""Minutes rather than seconds (`make test-long`): a killed rank of torchrun."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from cli import ROOT, tail
from models import lm_args
from ports import free_port

pytestmark = pytest.mark.long


def test_torchrun_ends_within_30_seconds_of_a_killed_rank(lm_data, tmp_path):
    words = lm_args(lm_data, tmp_path, "--save-interval-updates", 2, updates=100000)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
        "--master_port", free_port(), "-m", "fairseq_tutel.train", *words,
    ]  # fmt: skip
    with open(tmp_path / "log.txt", "w") as log:
        job = subprocess.Popen([str(w) for w in command], stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + 120
        while not (tmp_path / "checkpoint_last.pt").exists():
            assert time.monotonic() < deadline and job.poll() is None, tail(
                (tmp_path / "log.txt").read_text()
            )
            time.sleep(0.2)
        children = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(job.pid)], text=True)
        os.kill(int(children.split()[-1]), signal.SIGKILL)
        killed = time.monotonic()
        assert job.wait(timeout=60) != 0
        assert time.monotonic() - killed < 30
    for file in tmp_path.glob("*.pt"):
        assert torch.load(file, weights_only=False)["model"], file
