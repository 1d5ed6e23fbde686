"""Ends a run after a signal: all ranks finish the same update, save a checkpoint, and exit with EXIT_CODE.

A signal may reach only one of the ranks. In each update and validation step, fairseq sums log values over
the ranks. This module adds to these sums the number of ranks that received a signal. All ranks therefore
stop after the same update, without another collective.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from fairseq import checkpoint_utils
from torch.multiprocessing import ProcessExitedException

from fairseq_tutel.option import read, refuse_bad_values
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.failures import write_for_torchrun
from fairseq_tutel.parallel.signals import EXIT_CODE, SignalWatch
from fairseq_tutel.plugin.training.loop import globals_of, wrapping
from fairseq_tutel.plugin.training.options import PreemptionConfig

logger = logging.getLogger(__name__)


class ValidationEndedError(Exception):
    """Raised to end a validation after a signal, so that time remains for the save."""


@contextlib.contextmanager
def watching(cfg: Any, main: Any, spawns: bool = False) -> Iterator[SignalWatch | None]:
    """Context manager that receives the signals of --moe-preemption-signals while fairseq trains.

    The context manager yields the `SignalWatch`, or None if this process does not watch for signals.
    `spawns` is true if fairseq starts the ranks as child processes, to which this process forwards signals.
    """
    if cfg.common_eval.path is not None or globals_of(main) is None:
        yield None
        return
    options = read(PreemptionConfig, cfg.task)
    refuse_bad_values(options)
    # With model parallelism, fairseq does not sum log values over ranks that share a batch, so these ranks
    # would not get the number of signals.
    if not options.names or cfg.common.model_parallel_size > 1 or cfg.common.tpu:
        yield None
        return
    with SignalWatch(options.names, options.moe_preemption_seconds, spawns) as watch:
        try:
            yield watch
        except ProcessExitedException as error:
            if error.exit_code != EXIT_CODE:
                raise
            sys.exit(EXIT_CODE)


def run_watched(run: Any, main: Any, cfg: Any, **kwargs: Any) -> Any:
    """Call `run`, which calls `main`, in a rank that fairseq spawned, and receive signals meanwhile."""
    with watching(cfg, main) as signals:
        return run(cfg, **kwargs, **({} if signals is None else {"signals": signals}))


class Preemption:
    """Wraps functions of fairseq's training loop, to end the loop after an update if a rank got a signal.

    `count_saves` returns the number of saves in this run until now.
    """

    def __init__(self, watch: SignalWatch, count_saves: Callable[[], int]) -> None:
        self._watch, self._count_saves = watch, count_saves
        self._count: Any = 0.0  # Number of ranks that received a signal.
        self.result = ""  # Text for the log if a signal ended the run.

    def installed(self, main: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that wraps functions that fairseq's training function `main` calls."""
        return wrapping(main, train=self._train, validate_and_save=self._validate_and_save)

    def _train(self, original: Any) -> Any:
        is_first = True

        @functools.wraps(original)
        def train(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                if self._received_by_any():
                    self.result = "there is nothing to save before the first update"
                    return [None], True
                self._count_signals(trainer)
                self._end_validation(trainer)
                self._watch.begin_work()
            return original(cfg, trainer, task, epoch_itr)

        return train

    def _count_signals(self, trainer: Any) -> None:
        """Make a Trainer sum, with its log values, the number of ranks that received a signal."""
        original = trainer._aggregate_logging_outputs

        def aggregate(logging_outputs: Any, *extra: Any, ignore: bool = False) -> Any:
            own = float(self._watch.received is not None)
            outputs, (*sums, self._count) = original(logging_outputs, *extra, own, ignore=ignore)
            return outputs, sums

        trainer._aggregate_logging_outputs = aggregate

    def _is_ending(self) -> bool:
        """Return whether any rank received a signal before the latest update or validation step."""
        return bool(self._count) if world.size() > 1 else self._watch.received is not None

    def _end_validation(self, trainer: Any) -> None:
        """Make a validation end after the step in which a signal arrives."""
        original = trainer.valid_step

        def valid_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._is_ending():
                raise ValidationEndedError
            return result

        trainer.valid_step = valid_step

    def _validate_and_save(self, original: Any) -> Any:
        @functools.wraps(original)
        def validate_and_save(cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *args: Any) -> Any:
            saves = self._count_saves()
            losses: list[Any] = [None]
            try:
                losses, should_stop = original(cfg, trainer, task, epoch_itr, *args)
                if should_stop:
                    return losses, True
            except ValidationEndedError:
                logger.info("ended the validation after a signal")
            is_saved = self._count_saves() > saves
            # A signal may have come during the save, when ranks sum no log values.
            if not (self._is_ending() or (is_saved and self._received_by_any())):
                return losses, False
            if not is_saved:
                path = checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
                if path is not None and hasattr(task, "post_save"):
                    task.post_save(path, trainer.get_num_updates())
            self.result = _what_was_saved(cfg.checkpoint, trainer.get_num_updates())
            return losses, True

        return validate_and_save

    def _received_by_any(self) -> bool:
        """Return whether any rank has received a signal. Collective."""
        received = self._watch.received is not None
        return any(world.all_gather_object(received, "the check for signals"))


def _what_was_saved(cfg: Any, updates: int) -> str:
    if cfg.no_save or cfg.no_last_checkpoints:
        return f"update {updates} is not in checkpoint_last.pt"
    return f"update {updates} is saved in {cfg.save_dir}, and the same command continues the run"


def end_process(result: str) -> NoReturn:
    """Log that a signal ended the run, and end this process with EXIT_CODE."""
    line = f"a rank received a signal; {result}"
    logger.info("%s", line)
    write_for_torchrun(line)
    sys.exit(EXIT_CODE)
