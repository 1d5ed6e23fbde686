"""On a CPU, a thread runs the jobs of background communication in order."""

import threading

import pytest
import torch

from fairseq_tutel.parallel import background


def test_after_an_error_queued_communication_jobs_fail_without_sending():
    """A rank that waits for the rows of a failed job must not receive the rows of the next job."""
    all_begun, failed, sent = threading.Event(), threading.Event(), []

    def fail(rows):
        all_begun.wait()
        failed.set()
        raise RuntimeError("the peer is gone")

    def send(rows):
        sent.append(rows)
        return rows

    pending = [background.start(fail, torch.ones(1)), background.start(send, torch.ones(1))]
    all_begun.set()
    failed.wait()
    pending.append(background.start(send, torch.ones(1)))
    for each in pending:
        with pytest.raises(RuntimeError, match="the peer is gone"):
            each()
    assert sent == []
    background._worker = None
