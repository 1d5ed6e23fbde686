"""A command that uses a model, such as fairseq-generate, on several ranks: what they do for each other.

With --moe-expert-parallel-size P > 1 on the command line, P ranks share the experts of every model that the
command opens, in lockstep until all of them are done. Here is the state of the command that runs.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils

from fairseq_tutel.inference.lockstep import Lockstep
from fairseq_tutel.plugin import perplexity
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

logger = logging.getLogger(__name__)


class NoSentences(Exception):  # noqa: N818 - nothing is wrong
    """This rank has nothing to generate from, and stock would divide by the time that it took."""


@dataclass
class Command:
    """What runs: its FairseqConfig, and what it has opened so far."""

    cfg: Any
    lockstep: Lockstep | None = None
    scored: perplexity.Scored | None = None

    @property
    def expert_parallel_size(self) -> int:
        """P of the command line, for all models alike: a checkpoint's own is of its training."""
        return getattr(self.cfg.task, "moe_expert_parallel_size", 0) or 1

    def keep_in_step(self, layers: Sequence[MoEFeedForward]) -> None:
        """Let layers whose experts are shared wait for their turn."""
        if self.lockstep is None:
            self.lockstep = Lockstep(layers[0].topology.expert_group)
        for layer in layers:
            index = self.lockstep.add(layer.take_part)
            layer.wait_for_turn = partial(self.lockstep.wait_for_turn, index)

    def count(self, batches: Any, dictionary: Any) -> perplexity.Scored:
        """Return batches that fairseq-eval-lm scores, whose tokens are counted."""
        self.scored = perplexity.Scored(batches, dictionary, self.cfg)
        return self.scored

    def rest(self) -> None:
        """Serve the other ranks until none is in a model; all ranks call it equally often."""
        if self.lockstep is not None:
            self.lockstep.rest()

    def end(self, results: Any) -> None:
        """Serve the other ranks until all are done; then say what none of them knows alone.

        Args:
            results: what the command's `main` returned.
        """
        if self.lockstep is not None:
            self.lockstep.end()
            logger.info(
                "experts across ranks: %d calls of layers for this rank's tokens, %d for those of others",
                self.lockstep.calls,
                self.lockstep.served,
            )
        if self.scored is not None:
            perplexity.tell_of_all_ranks(results, self.scored.tokens)


_running: list[Command] = []


def running() -> Command | None:
    """Return the command that uses models on several ranks; None in a training, or on one rank."""
    return _running[0] if _running else None


class OnSeveralRanks:
    """A command's `main` for every rank; it can be pickled, for ranks that fairseq spawns."""

    def __init__(self, main: Any) -> None:
        self.main = main

    def __call__(self, cfg: Any, **kwargs: Any) -> None:
        """Run `main` on this rank's sentences, then serve the others until they are done."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            self.main(cfg, **kwargs)
            return
        command, results = Command(cfg), None
        _give_own_files(command)
        _let_stock_gather(cfg)
        _running[:] = [command]
        try:
            try:
                results = self.main(cfg, **kwargs)
            except NoSentences:
                logger.warning("rank %d has no sentences of its own", dist.get_rank())
            command.end(results)
        finally:
            _running.clear()


def _give_own_files(command: Command) -> None:
    """Give each rank a folder for its results, and what a person types to the first one alone."""
    cfg, rank = command.cfg, dist.get_rank()
    if cfg.common_eval.results_path is not None:
        cfg.common_eval.results_path = os.path.join(cfg.common_eval.results_path, f"rank{rank}")
    if command.expert_parallel_size > 1 and rank > 0:
        cfg.interactive.input = os.devnull


def _let_stock_gather(cfg: Any) -> None:
    """On a CPU, give the function that gathers fairseq-validate's logs the buffers it wants of a GPU."""
    if not torch.cuda.is_available():
        size, gather = cfg.common.all_gather_list_size, distributed_utils.all_gather_list
        gather._buffer = torch.empty(size * dist.get_world_size(), dtype=torch.uint8)
        gather._cpu_buffer = torch.empty(size, dtype=torch.uint8)
