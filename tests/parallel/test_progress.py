"""A progress bar is drawn on a terminal, without a new thread or a multiprocessing lock."""

import threading

from terminal import terminal
from tqdm import std

from fairseq_tutel.parallel.progress import progress


def test_a_progress_bar_is_drawn_on_a_terminal_and_disappears_at_the_end():
    with terminal() as drawn:
        with progress("copying", 4, "file") as advance:
            text = drawn()
            assert "copying:   0%|" in text and "| 0/4 [" in text
            advance(1)
        assert drawn().endswith("\r")
        with progress("reading", 3_000_000, "B"):
            assert "/3.00M [" in drawn()


def test_a_progress_bar_starts_no_thread_and_does_not_fix_the_multiprocessing_start_method(monkeypatch):
    """The default lock of tqdm is a multiprocessing lock, whose creation fixes the start method."""
    before = threading.active_count()
    monkeypatch.delattr(std.tqdm, "_lock", raising=False)
    monkeypatch.delattr(std.TqdmDefaultWriteLock, "mp_lock", raising=False)
    with terminal() as drawn, progress("copying", 4, "file"):
        assert threading.active_count() == before and drawn()
    assert not hasattr(std.TqdmDefaultWriteLock, "mp_lock")
