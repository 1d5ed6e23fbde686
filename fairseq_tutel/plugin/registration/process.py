"""How this process ends: error sentences as its last line, after calls that were registered for its end."""

import atexit
import contextlib
import dis
import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fairseq.data.iterators import BackgroundConsumer

from fairseq_tutel.files.small import error_line
from fairseq_tutel.plugin.registration.stock_errors import sentence_of
from fairseq_tutel.plugin.run_state import RUN

logger = logging.getLogger(__name__)

# A reader thread that hangs in a file system does not delay the end of the process longer.
SECONDS_FOR_READERS = 10.0


def end_readers() -> None:
    """End the threads that read fairseq's batches ahead, before the interpreter finalizes.

    Training that stops within an epoch leaves one. If it is inside a torch operation at finalization,
    the process aborts ("terminate called without an active exception", exit 134).
    """
    deadline = time.monotonic() + SECONDS_FOR_READERS
    for reader in threading.enumerate():
        if isinstance(reader, BackgroundConsumer):
            reader._max_len = 0  # it ends after the current batch
            while reader.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    reader._queue.get_nowait()
                reader.join(0.01)


def call_at_end(function: Callable[[], None]) -> None:
    """Call a function when this process ends, before the last error line."""
    if not RUN.at_exit:
        atexit.register(_end_calls)
    RUN.at_exit.append(function)


def _end_calls() -> None:
    while RUN.at_exit:
        RUN.at_exit.pop(0)()


@contextlib.contextmanager
def refusals_are_sentences() -> Iterator[None]:
    """End this process with the message of a refusal as its last line, without a traceback."""
    try:
        yield
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        sys.exit(_last_line(error, sentence))


def excepthook(original: Any) -> Any:
    """Wrap sys.excepthook to print a refusal's message alone; fairseq-generate's main is not wrapped."""

    @functools.wraps(original)
    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        sentence = _sentence(error)
        if sentence is None:
            _end_calls()
            original(kind, error, trace)
        else:
            print(_last_line(error, sentence), file=sys.stderr)

    return hook


def _last_line(error: BaseException, sentence: str) -> str:
    """Return the line that a refusal ends this process with, after everything that is logged before it."""
    _end_calls()
    # The logger's level does not decide: a module of fairseq's wav2vec2 sets the root's to DEBUG.
    if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        logger.debug("refused here", exc_info=error)
    return error_line(sentence)


def _sentence(error: BaseException) -> str | None:
    """Return one sentence for an error; None where the traceback is needed."""
    return str(error) if is_refusal(error) else sentence_of(error)


def is_refusal(error: BaseException | None) -> bool:
    """Whether this is a ValueError that a `raise` statement of this package raised.

    ValueErrors of other code, and of mistakes such as unpacking a tuple of another length, are not.
    """
    trace: Any = None if error is None else error.__traceback__
    if trace is None or not isinstance(error, ValueError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    is_ours = frame.f_globals["__name__"].partition(".")[0] == __name__.partition(".")[0]
    return is_ours and frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
