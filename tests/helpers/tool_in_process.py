"""Runs `python -m fairseq_tutel` in this process; returns its output or its error sentence."""

import contextlib
import io
import sys
from unittest import mock

import pytest

from fairseq_tutel.__main__ import main


def tool(*words):
    """Run the command line; return its output."""
    printed = io.StringIO()
    argv = ["fairseq_tutel", *map(str, words)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed):
        main()
    return printed.getvalue()


def convert(*words):
    """Run `convert`; return its output."""
    return tool("convert", *words)


def refusal(*words):
    """Run `convert`, which must end with an error sentence; return the sentence."""
    return refusal_of("convert", *words)


def refusal_of(*words):
    """Run the command line, which must end with an error sentence; return the sentence."""
    with pytest.raises(SystemExit) as end:
        tool(*words)
    message = end.value.code
    assert isinstance(message, str) and message.startswith("error: "), message
    assert "\n" not in message and message.endswith(".")
    return message.removeprefix("error: ")
