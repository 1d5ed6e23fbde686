"""Work beside the computation, on a GPU's stream and in a thread."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from ports import free_port

from fairseq_tutel.comm import background


class OnGpu:
    """A stream, or a tensor of a GPU; appends to `done` what is done with it."""

    is_cuda, device = True, torch.device("cuda:0")

    def __init__(self, done, name):
        self.done, self.name = done, name

    def wait_stream(self, other):
        self.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.done.append(f"{self.name} waits for {event.recorded}")

    def record_stream(self, stream):
        self.done.append(f"{self.name} is kept for {stream.name}")


def test_a_start_waits_for_what_came_before_and_what_follows_waits_for_it(monkeypatch):
    done = []
    current = [OnGpu(done, "main")]
    made = iter(("side", "a second one"))

    class Event:
        def record(self, stream):
            self.recorded = f"what {stream.name} did till then"
            done.append(f"{stream.name} is marked")

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def travel(rows):
        done.append(f"{rows.name} travels on {current[-1].name}, with gradients {torch.is_grad_enabled()}")
        return OnGpu(done, "out")

    monkeypatch.setattr(background, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: OnGpu(done, next(made)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pending = [background.start(travel, OnGpu(done, "rows")) for _ in range(2)]
    done.append("the experts run")
    assert pending[0]().name == "out"
    one = [
        "side waits for main", "rows is kept for side", "rows travels on side, with gradients False",
        "side is marked",
    ]  # fmt: skip
    after = ["the experts run", "main waits for what side did till then", "out is kept for main"]
    assert done == [*one, *one, *after]


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
