"""Work beside a GPU's computation: what waits for what, on streams that only write down what they are told.

Covered: the order of a start and its result; one stream a device; memory is kept for every stream that
reads it.
"""

import contextlib

import pytest
import torch

from fairseq_tutel.comm import background


class Said(list):
    """What was done, and the stack of current streams."""

    current: list


class Stream:
    """A stream with a name; whatever is done with it is written to `said`."""

    def __init__(self, said, name):
        self.said, self.name = said, name

    def wait_stream(self, other):
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.said.append(f"{self.name} waits for {event.recorded}")


class Rows:
    """A tensor of a GPU."""

    is_cuda, device = True, torch.device("cuda:0")

    def __init__(self, said, name):
        self.said, self.name = said, name

    def record_stream(self, stream):
        self.said.append(f"{self.name} is kept for {stream.name}")


@pytest.fixture
def said(monkeypatch):
    """Return the list of what is done on stand-ins of torch's streams, of which "main" is current first."""
    said = Said()
    current = [Stream(said, "main")]

    class Event:
        recorded = "nothing"

        def record(self, stream):
            self.recorded = f"what {stream.name} did till then"
            said.append(f"{stream.name} is marked")

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(background, "_streams", {})
    made = iter(("side", "a second one"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(said, next(made)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    said.current = current
    return said


def test_a_start_waits_for_what_came_before_and_what_follows_waits_for_it(said):
    def travel(rows):
        said.append(
            f"{rows.name} travels on {said.current[-1].name}, with gradients {torch.is_grad_enabled()}"
        )
        return Rows(said, "out")

    pending = [background.start(travel, Rows(said, "rows")) for _ in range(2)]
    said.append("the experts run")
    assert pending[0].result().name == "out"
    one = [
        "side waits for main",
        "rows is kept for side",
        "rows travels on side, with gradients False",
        "side is marked",
    ]
    assert said == [
        *one,
        *one,
        "the experts run",
        "main waits for what side did till then",
        "out is kept for main",
    ]
