"""Work beside the computation, on a GPU's stream and in a thread."""

import os
import subprocess
import sys

import pytest
import torch
from ports import free_port

from fairseq_tutel.parallel import background


def test_the_stream_of_exchanges_has_a_higher_priority(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: priority)
    assert background._exchange_stream.__wrapped__("cuda:0") < 0


SCRIPT = """
import os, torch, torch.distributed as dist, fairseq_tutel as ft
dist.init_process_group("gloo")
layer = ft.MoELayer(ft.MoEConfig(8, 16, 4), ft.make_topology([4]), seed=1)
layer.follow(ft.How(overlap=int(os.environ["OVERLAP"])))
x = torch.randn(32, 8)
layer(x)
if dist.get_rank() == 1:
    def fail(*_, **__):
        raise ValueError("a broken expert")
    layer.experts.run_unsorted = fail
layer(x)[0].sum().backward()
"""


@pytest.mark.long
@pytest.mark.parametrize("overlap", (1, 4))
def test_an_error_on_one_rank_ends_both_with_an_error(overlap):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    base = {**os.environ, **address}
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
