"""Controls the end of a process: runs exit functions, then prints errors without a traceback."""

import atexit
import contextlib
import dis
import functools
import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from fairseq.data.iterators import BackgroundConsumer
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import Dataset

from fairseq_tutel.checkpoint.atomic_save import unwritable
from fairseq_tutel.files import error_line
from fairseq_tutel.option import flag_of
from fairseq_tutel.parallel.failures import write_for_torchrun
from fairseq_tutel.parallel.guard import CommunicationError
from fairseq_tutel.plugin.registration.variants import change_class

logger = logging.getLogger(__name__)

# Functions to call before the last error line.
_at_exit: list[Callable[[], None]] = []
# Maximum time that the exit waits for reader threads, which may hang in a file system.
SECONDS_FOR_READERS = 10.0
# A request for this much memory means that the options in a checkpoint file are wrong.
ABSURD_BYTES = 2**44
REASON = 300  # maximum number of characters of an original error that a message quotes
# Bad options and files; NaN in training; files that cannot be written; lack of memory or another failure of
# one of the ranks.
FOR_USERS = (ValueError, FloatingPointError, OSError, MemoryError, CommunicationError)
SIZES = ("max_tokens", "batch_size", "required_batch_size_multiple")
# Functions that open a checkpoint, with the name of the variable that holds the path.
OPENING = {
    "load_checkpoint_to_cpu": "path",
    "load_model_ensemble_and_task": "filename",
    "load_checkpoint": "filename",
    "resumed_model": "path",
}
# Functions that read the data folder.
OPENS_DATA = {"setup_task", "load_dataset"}
# Functions that read data while a checkpoint is being opened.
READING = {"load_dataset", "get_train_iterator"}
MISSING_MODULE = re.compile(r"No module named '([\w.]+)'|Please install (\w+)")
# fairseq's error for a missing file of a bpe or tokenizer.
ENCODER_FILE = re.compile("file (.*) not found", re.DOTALL)
MISSING_SPLIT = re.compile(r"Dataset not found: (\S+) \((.*)\)")
# The last line of the traceback that a spawned rank passes to the process that spawned it.
RANK_ERROR = re.compile(r"\.RankError: (error: .*)\s*\Z")


class RankError(Exception):
    """A user's error in a rank that fairseq spawned; the message is the last line to print."""


def end_readers() -> None:
    """Stop the threads in which fairseq prefetches batches, before the Python interpreter exits.

    A training run that stops in the middle of an epoch leaves such a thread. If the thread is inside a
    torch operation at finalization, the process aborts with exit code 134 ("terminate called without an
    active exception").
    """
    deadline = time.monotonic() + SECONDS_FOR_READERS
    for reader in threading.enumerate():
        if isinstance(reader, BackgroundConsumer):
            reader._max_len = 0  # makes the thread stop after the current batch
            while reader.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    reader._queue.get_nowait()
                reader.join(0.01)


def call_at_end(function: Callable[[], None]) -> None:
    """Register a function that is called when this process ends, before the last error line is printed."""
    if not _at_exit:
        atexit.register(_end_calls)
    _at_exit.append(function)


def _end_calls() -> None:
    while _at_exit:
        _at_exit.pop(0)()


@contextlib.contextmanager
def refusals_are_sentences() -> Iterator[None]:
    """Context manager that turns a user's error into its message and an exit, without a traceback."""
    try:
        yield
    except Exception as error:
        line = _last_line(error)
        if line is None:
            raise
        write_for_torchrun(line)
        sys.exit(line)


def run_as_spawned(main: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `main` in a rank that fairseq spawned; raise RankError for a user's error.

    The process that spawned the ranks gets an exception as a traceback in text, and prints the sentence.
    """
    try:
        return main(*args, **kwargs)
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        raise RankError(error.code) from None
    except Exception as error:
        line = _last_line(error)
        if line is None:
            raise
        raise RankError(line) from None


def excepthook(original: Any) -> Any:
    """Wrap sys.excepthook so that it prints a user's error without a traceback.

    The hook is needed because the main function of fairseq-generate is not wrapped.
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
    """Call the exit functions; return the last error line, or None if a traceback must be printed."""
    _end_calls()
    if isinstance(error, ProcessRaisedException):
        found = RANK_ERROR.search(str(error))
        return found[1] if found else None
    text = getattr(error, "strerror", None) or str(error)  # the str of an OSError begins with its number
    sentence = text if is_refusal(error) else sentence_of(error)
    # The logger's level cannot be used, because fairseq's wav2vec2 sets the root logger to DEBUG.
    if sentence is not None and os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        logger.debug("traceback of the error", exc_info=error)
    return None if sentence is None else error_line(sentence)


def is_refusal(error: BaseException | None) -> bool:
    """Return whether a `raise` statement of this package raised an error whose message is for users.

    The result is False for errors of other code, and for bugs such as unpacking a wrong tuple.
    """
    trace: Any = None if error is None else error.__traceback__
    if trace is None or not isinstance(error, FOR_USERS):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    is_ours = frame.f_globals["__name__"].partition(".")[0] == __name__.partition(".")[0]
    return is_ours and frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def sentence_of(error: BaseException) -> str | None:
    """Return one sentence that explains an error that fairseq raised; None for any other error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for explain in EXPLANATIONS:
        sentence = explain(error, frames) if frames else None
        if sentence is not None:
            return sentence
    return None


def _missing_data(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    opens_data = {frame.f_code.co_name for frame in frames if _is_of_fairseq(frame)} & OPENS_DATA
    if opens_data and str(error).startswith("Could not infer language pair"):
        return (
            "the data folder has no file train.SRC-TGT…, from which fairseq infers the languages; give the "
            "folder that fairseq-preprocess wrote, or add --source-lang and --target-lang."
        )
    if not (opens_data and isinstance(error, FileNotFoundError)):
        return None
    if split := MISSING_SPLIT.fullmatch(str(error)):
        return (
            f"the data folder has no split {split[1]} ({split[2]}); give the folder that "
            "fairseq-preprocess wrote, or name an existing split."
        )
    name = error.filename or str(error)
    return f"the data file {name} does not exist; give a folder with prepared data."


def _empty_data(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    if str(error) != "cannot mmap an empty file":
        return None
    opening = [f.f_locals for f in frames if _is_of_fairseq(f) and f.f_code.co_name == "_do_init"]
    if not opening:
        return None
    # fairseq's __del__ fails if the file was never mapped, and Python would print that failure last.
    change_class(opening[-1]["self"], Dataset)
    return (
        f"the data file {opening[-1]['path']}.bin is empty; run fairseq-preprocess on a text with at "
        "least one line, or add --disable-validation if only the validation set is empty."
    )


def _no_batch(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    names_no_option = type(error) is Exception and str(error).startswith("The dataset is empty")
    fails_on_none = isinstance(error, IndexError) and frames[-1].f_code.co_name == "batch_by_size"
    if not (_is_of_fairseq(frames[-1]) and (names_no_option or fails_on_none)):
        return None
    configs = [frame.f_locals["cfg"] for frame in frames if "cfg" in frame.f_locals]
    sizes = next((cfg.dataset for cfg in configs if getattr(cfg, "dataset", None)), None)
    given = [f"{flag_of(k)} is {getattr(sizes, k)}" for k in SIZES if getattr(sizes, k, None)]
    return (
        f"no batch fits {', '.join(given) or 'the limits'}: every example is longer than --max-tokens, or "
        "there are fewer examples than --required-batch-size-multiple; raise --max-tokens, lower "
        "--required-batch-size-multiple, or shorten the examples (--tokens-per-sample)."
    )


def _no_finite_score(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """Return a message for fairseq's failed assertion in a beam search without finite scores."""
    last = frames[-1]
    is_search = last.f_globals.get("__name__") == "fairseq.sequence_generator"
    scores = last.f_locals.get("lprobs")
    if not (isinstance(error, AssertionError) and is_search and torch.is_tensor(scores)):
        return None
    if scores.isfinite().any():
        return None
    return (
        "the model gives no word a finite score, for example because its weights are NaN; give another "
        "checkpoint in --path."
    )


def _missing_module(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    # One fairseq module raises a str in its handler of the ImportError, which causes a TypeError.
    cause = error.__context__ if isinstance(error, TypeError) else error
    found = MISSING_MODULE.search(str(cause)) if isinstance(cause, ImportError) else None
    # A DataLoader worker passes its traceback as text.
    if not (found and (_is_of_fairseq(frames[-1]) or "/fairseq/" in str(error))):
        return None
    name = found[1] or found[2]
    return f"fairseq needs the module {name}, which is not installed; run `pip install {name}`."


def _missing_file(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    if not isinstance(error, OSError):
        return None
    if (found := ENCODER_FILE.fullmatch(str(error))) and _is_of_fairseq(frames[-1]):
        return (
            f"{found[1]} does not exist, but --bpe or --tokenizer needs it; give the path of an existing "
            "file, such as --sentencepiece-model FILE."
        )
    found = re.fullmatch("Model file not found: (.*)", str(error), re.DOTALL)
    if not found:
        return None
    return f"--path is {found[1]}, which does not exist; give an existing checkpoint file."


def _unwritable(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    folders = [f.f_locals["save_dir"] for f in frames if f.f_code.co_name == "verify_checkpoint_directory"]
    return unwritable(folders[0], error) if folders and isinstance(error, OSError) else None


def _misfit(error: BaseException, frames: Sequence[FrameType]) -> str | None:
    """Return a message for an error while a checkpoint is opened, for example different shapes."""
    names = {frame.f_code.co_name for frame in frames}
    if isinstance(error, MemoryError) or names & READING or is_machine_error(error):
        return None
    paths = [frame.f_locals.get(OPENING.get(frame.f_code.co_name, "")) for frame in frames]
    path = next((path for path in reversed(paths) if isinstance(path, str)), None)
    if path is None:
        return None
    reason = " ".join(str(error).split())[:REASON]
    return (
        f"{path} does not fit this command's model, data or options ({type(error).__name__}: {reason}); "
        "remove options that change the model, or give another checkpoint."
    )


# Functions that explain an error of fairseq in one sentence; the first explanation is used.
EXPLANATIONS = (
    _missing_data, _empty_data, _no_batch, _no_finite_score, _missing_module, _missing_file, _unwritable,
    _misfit,
)  # fmt: skip


def is_machine_error(error: BaseException) -> bool:
    """Return whether lack of memory or a failure of another rank caused an error."""
    text = str(error)
    memory = re.search(r"out of memory|allocate( \d+ bytes|.? memory)|tried to allocate", text)
    size = re.search(r"tried to allocate (\d+) bytes", text)
    is_absurd = size is not None and int(size[1]) >= ABSURD_BYTES
    return isinstance(error, CommunicationError) or (memory is not None and not is_absurd)


def _is_of_fairseq(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == "fairseq"
