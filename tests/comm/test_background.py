"""Work beside the computation, on a GPU's stream and in a thread."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from ports import free_port

from fairseq_tutel.comm import background


class Events(list):
    """What was done, and the stack of current streams."""

    current: list


class Stream:
    """A stream with a name; whatever is done with it is written to `said`."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.events.append(f"{self.name} waits for {event.recorded}")


class Rows:
    """A tensor of a GPU."""

    is_cuda, device = True, torch.device("cuda:0")

    def __init__(self, events, name):
        self.events, self.name = events, name

    def record_stream(self, stream):
        self.events.append(f"{self.name} is kept for {stream.name}")


@pytest.fixture
def events(monkeypatch):
    """Return the list of what is done on stand-ins of torch's streams, of which "main" is current first."""
    events = Events()
    current = [Stream(events, "main")]

    class Event:
        recorded = "nothing"

        def record(self, stream):
            self.recorded = f"what {stream.name} did till then"
            events.append(f"{stream.name} is marked")

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(background, "_streams", {})
    made = iter(("side", "a second one"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(events, next(made)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    events.current = current
    return events


def test_a_start_waits_for_what_came_before_and_what_follows_waits_for_it(events):
    def travel(rows):
        events.append(
            f"{rows.name} travels on {events.current[-1].name}, with gradients {torch.is_grad_enabled()}"
        )
        return Rows(events, "out")

    pending = [background.start(travel, Rows(events, "rows")) for _ in range(2)]
    events.append("the experts run")
    assert pending[0].result().name == "out"
    one = [
        "side waits for main",
        "rows is kept for side",
        "rows travels on side, with gradients False",
        "side is marked",
    ]
    assert events == [
        *one,
        *one,
        "the experts run",
        "main waits for what side did till then",
        "out is kept for main",
    ]


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
    layer.experts.forward = fail
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
