"""A process records the first signal, and ends after a second signal or a time limit."""

import multiprocessing
import os
import signal
import time

import forkserver
import pytest

from fairseq_tutel.parallel import signals
from fairseq_tutel.parallel.signals import EXIT_CODE, SignalWatch

SECONDS = 20


def _send(number):
    os.kill(os.getpid(), number)


def _wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _run(function, *args):
    """Run a function in a new process, and return the exit code, which is 1 after an error."""
    process = forkserver.context().Process(target=function, args=args)
    process.start()
    process.join(SECONDS)
    assert process.exitcode is not None
    return process.exitcode


def _records_and_merges():
    before = signal.getsignal(signal.SIGTERM)
    with SignalWatch(["SIGTERM", "SIGUSR1"], SECONDS) as watch:
        assert watch.received is None and watch.elapsed == 0
        _send(signal.SIGUSR1)
        _send(signal.SIGTERM)  # Some launchers send SIGTERM besides SIGUSR1.
        _wait_for(lambda: watch.received)
        assert watch.received in ("SIGUSR1", "SIGTERM") and 0 <= watch.elapsed < SECONDS
    _send(signal.SIGTERM)  # The process ignores this signal, because it is about to end.
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN != before


def test_two_signals_within_a_short_time_count_as_one_signal():
    assert _run(_records_and_merges) == 0


def _restores():
    signal.signal(signal.SIGUSR2, lambda *_: None)
    own, before = signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGTERM)
    with SignalWatch(["SIGTERM", "SIGUSR2"], SECONDS) as watch:
        assert signal.getsignal(signal.SIGUSR2) == own
        assert signal.getsignal(signal.SIGTERM) != before
        _send(signal.SIGUSR2)
        time.sleep(0.1)
        assert watch.received is None
    assert signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1


def test_signal_handlers_of_other_code_are_kept_and_all_handlers_are_restored():
    assert _run(_restores) == 0


def _is_sent_twice(has_work):
    signals.MERGE_SECONDS = 0.2
    watch = SignalWatch(["SIGTERM"], SECONDS)
    if has_work:
        watch.begin_work()
    _send(signal.SIGTERM)
    time.sleep(0.4)
    _send(signal.SIGTERM)
    time.sleep(SECONDS)


@pytest.mark.parametrize("has_work", [True, False])
def test_a_second_signal_ends_the_process_immediately(has_work):
    assert _run(_is_sent_twice, has_work) == (128 + signal.SIGTERM if has_work else EXIT_CODE)


def _takes_too_long():
    watch = SignalWatch(["SIGUSR1"], 0.1)
    watch.begin_work()
    _send(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})  # Python runs no signal handler during sigwait.


def test_the_time_limit_ends_the_process_while_the_main_thread_waits():
    assert _run(_takes_too_long) == 128 + signal.SIGUSR1


def _has_a_child():
    with SignalWatch(["SIGTERM", "SIGUSR1"], SECONDS) as watch:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"1")
            time.sleep(SECONDS)
            os._exit(3)
        os.read(ready, 1)
        os.kill(child, signal.SIGUSR1)
        if os.fork() == 0:  # This sender is not the parent of the child.
            os.kill(child, signal.SIGTERM)
            os._exit(0)
        time.sleep(0.3)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0) == (child, 0)
        assert watch.received is None  # The parent has not received the child's signals.


def test_a_child_process_obeys_only_signals_of_its_parent():
    assert _run(_has_a_child) == 0


def _forwards():
    with SignalWatch(["SIGTERM"], 0.1, forwards=True) as watch:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(SECONDS,))
        child.start()
        time.sleep(0.3)
        _send(signal.SIGTERM)
        child.join(SECONDS / 2)
        assert child.exitcode == 0 and watch.received


def test_the_process_that_spawned_ranks_forwards_signals_to_the_ranks():
    assert _run(_forwards) == 0
