"""`python -m fairseq_tutel convert` run in this process: what it printed, or the sentence it ended with."""

import contextlib
import io
import sys
from unittest import mock

import pytest

from fairseq_tutel.__main__ import main


def convert(*words):
    """Run the tool; return what it printed."""
    printed = io.StringIO()
    argv = ["fairseq_tutel", "convert", *map(str, words)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed):
        main()
    return printed.getvalue()


def refusal(*words):
    """Run the tool, which must end with one sentence; return it."""
    with pytest.raises(SystemExit) as end:
        convert(*words)
    message = end.value.code
    assert isinstance(message, str) and message.startswith("error: "), message
    assert "\n" not in message and message.endswith(".")
    return message.removeprefix("error: ")
