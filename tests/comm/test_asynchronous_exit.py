"""A process that fails in the middle of an exchange in chunks ends by its error, not by a signal."""

import os
import subprocess
import sys

import pytest
from ports import free_port

SCRIPT = """
import os, torch, torch.distributed as dist, fairseq_tutel as ft
dist.init_process_group("gloo")
layer = ft.MoELayer(ft.MoEConfig(8, 16, 4), ft.make_topology([4]), seed=1)
layer.follow(ft.How(overlap=int(os.environ["OVERLAP"])))
x = torch.randn(32, 8)
layer(x)
if dist.get_rank() == 1:
    def fail(*_):
        raise ValueError("a broken expert")
    layer.experts.forward = fail
layer(x)[0].sum().backward()
"""


@pytest.mark.parametrize("overlap", (pytest.param(1, marks=pytest.mark.long), 4))
def test_an_error_on_one_rank_ends_both_with_an_error(overlap):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    base = {**os.environ, **place}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**base, "RANK": str(rank), "OVERLAP": str(overlap), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], errors
    assert "ValueError: a broken expert" in errors[1]
    assert "CommunicationError: rank 0 could not finish the exchange of" in errors[0]
