"""Background communication: a thread on a CPU, a stream on a GPU."""

import threading

import pytest
import torch

from fairseq_tutel.parallel import background


def test_after_an_error_later_jobs_fail_without_sending():
    """Otherwise, a peer that waits for rows of the first job would receive rows of the second job."""
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
