"""`python -m fairseq_tutel` run in this process: what it printed, or the sentence it ended with."""

import contextlib
import io
import sys
from unittest import mock

import pytest

from fairseq_tutel.__main__ import main


def tool(*words):
    """Run the command line; return what it printed."""
    printed = io.StringIO()
    argv = ["fairseq_tutel", *map(str, words)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed):
        main()
    return printed.getvalue()


def convert(*words):
    """Run `convert`; return what it printed."""
    return tool("convert", *words)


def refusal(*words):
    """Run `convert`, which must end with one sentence; return it."""
    return refusal_of("convert", *words)


def refusal_of(*words):
    """Run the command line, which must end with one sentence; return it."""
    with pytest.raises(SystemExit) as end:
        tool(*words)
    message = end.value.code
    assert isinstance(message, str) and message.startswith("error: "), message
    assert "\n" not in message and message.endswith(".")
    return message.removeprefix("error: ")
