"""Prints no traceback for an error that a user can fix, and ends fairseq's reader threads at exit."""

import contextlib
import functools
import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from fairseq.data.iterators import BackgroundConsumer
from torch.multiprocessing import ProcessRaisedException

from fairseq_tutel.files import error_line
from fairseq_tutel.parallel.failures import write_for_torchrun
from fairseq_tutel.parallel.guard import CommunicationError

logger = logging.getLogger(__name__)

# Maximum time for which a process waits at exit for reader threads, which may hang in a file system.
SECONDS_FOR_READERS = 10.0
REASON = 300  # Maximum number of characters of an original error that a message quotes.
# Errors that users can fix: bad options or files, NaN, failed writes, lack of memory, failed ranks.
FOR_USERS = (ValueError, FloatingPointError, OSError, MemoryError, CommunicationError)
MEMORY = re.compile(r"out of memory|can't allocate memory|Unable to allocate", re.DOTALL)
LANGUAGES = re.compile("Could not infer language pair")
# Common errors of fairseq and torch, each with a type, a pattern of the message, and a sentence to print.
EXPLAINED: tuple[tuple[type[Exception], re.Pattern, str], ...] = (
    (
        FileNotFoundError,
        re.compile(r"Dataset not found: (\S+) \((.*)\)"),
        "the data folder has no split {0} ({1}); give the folder that fairseq-preprocess wrote, or name an "
        "existing split.",
    ),
    (
        FileNotFoundError,
        re.compile(r"\[Errno 2\] No such file or directory: '(.*dict.*\.txt)'"),
        "the data file {0} does not exist; give the folder that fairseq-preprocess wrote.",
    ),
    (
        Exception,
        re.compile("cannot mmap an empty file|The dataset is empty"),
        "there is no batch: a data file is empty, or every example is longer than --max-tokens, or there "
        "are fewer than --required-batch-size-multiple; check the data and these options.",
    ),
    (
        Exception,
        LANGUAGES,
        "the data folder has no file train.SRC-TGT…, from which fairseq infers the languages; give the "
        "folder that fairseq-preprocess wrote, or add --source-lang and --target-lang.",
    ),
    (
        OSError,
        re.compile(r"Model file not found: (.*)", re.DOTALL),
        "--path is {0}, which does not exist; give an existing checkpoint file.",
    ),
    (
        Exception,
        re.compile(r"Cannot load model parameters from checkpoint (.*); please ensure"),
        "{0} does not fit this model ({cause}); give the --arch, options and data of the run that saved "
        "it, or convert it to another dictionary with `fairseq-tutel convert vocabulary`.",
    ),
    (RuntimeError, MEMORY, "out of memory ({cause}); lower --max-tokens or --batch-size."),
)
# The last line of a traceback from a rank that fairseq spawned.
RANK_ERROR = re.compile(r"\.RankError: (error: .*)\s*\Z")


class RankError(Exception):
    """A user's error in a rank that fairseq spawned; the exception's message is the last line to print."""


def end_readers() -> None:
    """Stop the threads in which fairseq prefetches batches, before the Python interpreter exits.

    If a training run stops in the middle of an epoch, a prefetch thread is still running. If the Python
    interpreter exits while a prefetch thread is in a torch operation, the process aborts with exit code 134
    ("terminate called without an active exception").
    """
    deadline = time.monotonic() + SECONDS_FOR_READERS
    for reader in threading.enumerate():
        if isinstance(reader, BackgroundConsumer):
            reader._max_len = 0  # The reader thread stops after the current batch.
            while reader.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    reader._queue.get_nowait()
                reader.join(0.01)


@contextlib.contextmanager
def refusals_are_sentences() -> Iterator[None]:
    """Context manager that ends the process without a traceback at an error that a user can fix."""
    try:
        yield
    except Exception as error:
        line = _last_line(error)
        if line is None:
            raise
        write_for_torchrun(line)
        sys.exit(line)


def run_as_spawned(main: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `main` in a rank that fairseq spawned; raise RankError for an error that a user can fix.

    The process that spawned the ranks gets the rank's traceback as text, and prints only the message.
    """
    try:
        with refusals_are_sentences():
            return main(*args, **kwargs)
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        raise RankError(error.code) from None


def excepthook(original: Any) -> Any:
    """Wrap sys.excepthook to print only the message, not a traceback, of an error that a user can fix.

    The excepthook is needed because the main function of fairseq-generate is not wrapped.
    """

    @functools.wraps(original)
    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        line = _last_line(error)
        if line is None:
            original(kind, error, trace)
        else:
            write_for_torchrun(line)
            print(line, file=sys.stderr)

    return hook


def _last_line(error: BaseException) -> str | None:
    """Return the line to print for an error, or None if the traceback must be printed."""
    if isinstance(error, ProcessRaisedException):
        found = RANK_ERROR.search(str(error))
        return found[1] if found else None
    sentence = str(error) if is_refusal(error) else _explained(error)
    if sentence is None:
        return None
    # A traceback is logged if LOGLEVEL is DEBUG. The root logger's level is not used, because fairseq's
    # wav2vec2 sets this level to DEBUG.
    if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        logger.debug("traceback of the error", exc_info=error)
    # The object of a data set that fairseq could not open prints an error when Python frees the object.
    # The object is therefore freed before the error message is printed.
    traceback.clear_frames(error.__traceback__)
    return error_line(sentence.removeprefix(f"[Errno {getattr(error, 'errno', None)}] "))


def is_refusal(error: BaseException) -> bool:
    """Return whether this package raised an error whose message is written for users."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = __name__.partition(".")[0]
    return (
        isinstance(error, FOR_USERS)
        and bool(frames)
        and frames[-1].f_globals.get("__name__", "").partition(".")[0] == package
    )


def _explained(error: BaseException) -> str | None:
    """Return the sentence of `EXPLAINED` for an error of fairseq or torch, or None for other errors."""
    for kind, pattern, sentence in EXPLAINED:
        if isinstance(error, kind) and (found := pattern.search(str(error))):
            cause = " ".join(str(error.__context__ or error).split())[:REASON].rstrip(".")
            return sentence.format(*found.groups(), cause=cause)
    return None


def is_machine_error(error: BaseException) -> bool:
    """Return whether lack of memory or a failure of another rank caused an error."""
    return isinstance(error, CommunicationError | MemoryError) or bool(MEMORY.search(str(error)))
