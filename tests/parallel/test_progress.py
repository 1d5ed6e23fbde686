"""Progress bars: only rank 0 draws them, on a terminal, for long work."""

import threading

from terminal import terminal
from tqdm import std

from fairseq_tutel.parallel.progress import progress


def test_a_bar_is_drawn_on_a_terminal_and_disappears():
    with terminal() as drawn:
        with progress("copying", 4, "file") as advance:
            text = drawn()
            assert "copying:   0%|" in text and "| 0/4 [" in text
            advance(1)
        assert drawn().endswith("\r")
        with progress("reading", 3_000_000, "B"):
            assert "/3.00M [" in drawn()


def test_a_bar_starts_no_thread_and_leaves_multiprocessing_alone(monkeypatch):
    """tqdm's default lock is a multiprocessing lock; creating it fixes the start method."""
    before = threading.active_count()
    monkeypatch.delattr(std.tqdm, "_lock", raising=False)
    monkeypatch.delattr(std.TqdmDefaultWriteLock, "mp_lock", raising=False)
    with terminal() as drawn, progress("copying", 4, "file"):
        assert threading.active_count() == before and drawn()
    assert not hasattr(std.TqdmDefaultWriteLock, "mp_lock")
