"""Runs `python -m fairseq_tutel` in this process, and returns the output or the error sentence."""

import contextlib
import io
import logging
import sys
from unittest import mock

import pytest

from fairseq_tutel.__main__ import main


def tool(*words):
    """Run a command line of the package, and return the printed output."""
    printed = io.StringIO()
    argv = ["fairseq_tutel", *map(str, words)]
    try:
        with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed):
            main()
    finally:
        logging.getLogger("fairseq").setLevel(logging.NOTSET)  # `translate` changes the level.
    return printed.getvalue()


def convert(*words):
    """Run `fairseq-tutel convert`, and return the printed output."""
    return tool("convert", *words)


def refusal(*words):
    """Run `fairseq-tutel convert`, which must fail, and return the error sentence."""
    return refusal_of("convert", *words)


def refusal_of(*words):
    """Run a command line of the package, which must fail, and return the error sentence."""
    with pytest.raises(SystemExit) as end:
        tool(*words)
    message = end.value.code
    assert isinstance(message, str) and message.startswith("error: "), message
    assert "\n" not in message and message.endswith(".")
    return message.removeprefix("error: ")
