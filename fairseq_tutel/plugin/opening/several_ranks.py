"""Runs commands that use a model on several ranks, such as fairseq-generate.

With --moe-expert-parallel-size P > 1 on the command line, P ranks share the experts of every model that the
command opens, and run in lockstep. fairseq-eval-lm logs the perplexity of each rank; this module also logs
the perplexity of all ranks together.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from fairseq_tutel.inference.lockstep import Lockstep
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.option import read
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.agreement import agree
from fairseq_tutel.parallel.groups import Topology, make_topology
from fairseq_tutel.plugin.feed_forward import MoEFeedForward
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.options import TaskConfig
from fairseq_tutel.plugin.training.startup import allocate_gather_buffers, limit_fairseq_groups, set_timeout

logger = logging.getLogger(__name__)


class Scored:
    """Wraps the batches of fairseq-eval-lm to count the scored tokens, for the mean loss."""

    def __init__(self, batches: Any, dictionary: Any, cfg: Any) -> None:
        self.batches, self.pad = batches, dictionary.pad()
        self.tokens = 0
        self.without_first = bool(getattr(cfg.task, "add_bos_token", False))
        # All pieces of a word count as one token.
        mark = cfg.common_eval.post_process
        ends = mark.rstrip() if mark in ("subword_nmt", "@@ ") else ()
        self.continues = torch.tensor([word.endswith(ends) for word in dictionary.symbols])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for sample in self.batches:
            for target in sample["target"] if "net_input" in sample else ():
                words = target[target != self.pad].cpu()[int(self.without_first) :]
                self.tokens += len(words) - int(self.continues[words[:-1]].sum())
            yield sample


def log_perplexity(results: dict[str, Any], tokens: int) -> None:
    """Log the mean loss and the perplexity over the tokens of all ranks. Collective."""
    own = float(results["loss"]) * tokens, tokens
    parts = world.all_gather_object(own, "the gathering of all ranks' losses")
    total = sum(count for _, count in parts)
    if total == 0:
        raise ValueError(
            "no rank scored a token, so there is no perplexity: fairseq-eval-lm skips samples that are "
            "longer than the model allows; give the --tokens-per-sample with which the model was trained."
        )
    loss = sum(bits for bits, _ in parts) / total
    logger.info(
        "all %d ranks: %s tokens, Loss (base 2): %.4f, Perplexity: %.2f",
        *(len(parts), f"{total:,}", loss, 2**loss),
    )


class NoSentences(Exception):  # noqa: N818 - not an error
    """Raised on a rank without sentences, to skip generation; fairseq would divide by zero."""


class Command:
    """A running command, such as fairseq-generate, that uses its models on several ranks."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        # The command line's value holds for all models; the value in a checkpoint is ignored.
        self.expert_parallel_size = read(TaskConfig, cfg.task).moe_expert_parallel_size or 1
        self.lockstep: Lockstep | None = None
        self.scored: Scored | None = None
        self._turns: dict[MoEFeedForward, int] = {}

    def keep_in_step(self, layers: Sequence[MoEFeedForward]) -> None:
        """Make a model's MoE layers wait for the same call on other ranks, if its experts are spread."""
        if layers[0].topology.expert_parallel_size == 1:
            return
        facts: dict[str, Any] = {
            label_of(field.name): [getattr(layer.config, field.name) for layer in layers]
            for field in fields(MoEConfig)
        }
        facts["the layers with experts"] = [layer.name for layer in layers]
        facts["the strategy of the layers"] = [str(layer.strategy) for layer in layers]
        agree(facts)
        if self.lockstep is None:
            self.lockstep = Lockstep(layers[0].topology.expert_group)
        self._turns |= {layer: self.lockstep.add(layer.run_without_tokens) for layer in layers}

    def wait_for_turn(self, layer: MoEFeedForward) -> None:
        """Block until all ranks call this layer."""
        if layer in self._turns:
            assert self.lockstep is not None
            self.lockstep.wait_for_turn(self._turns[layer])

    def count(self, batches: Any, dictionary: Any) -> Scored:
        """Wrap the batches of fairseq-eval-lm so that their tokens are counted."""
        self.scored = Scored(batches, dictionary, self.cfg)
        return self.scored

    def rest(self) -> None:
        """Run this rank's experts for other ranks until no rank runs a model. Collective."""
        if self.lockstep is not None:
            self.lockstep.rest()

    def end(self, results: Any) -> None:
        """Run this rank's experts for other ranks until all finish, then log the results of all ranks."""
        if self.lockstep is not None:
            self.lockstep.end()
            logger.info(
                "experts across ranks: %d layer calls for this rank's tokens, %d for other ranks' tokens",
                *(self.lockstep.calls, self.lockstep.served),
            )
        if self.scored is not None:
            log_perplexity(results, self.scored.tokens)


# The command that runs in this process, if it uses models on several ranks.
_running: list[Command] = []


def running_command() -> Command | None:
    """Return the command that uses its models on several ranks, or None."""
    return _running[-1] if _running else None


def run_on_several_ranks(main: Any, cfg: Any, **kwargs: Any) -> None:
    """Run a command's `main` on this rank's sentences, then run this rank's experts for the others."""
    if world.size() == 1:
        main(cfg, **kwargs)
        return
    command, rank, results = Command(cfg), dist.get_rank(), None
    if cfg.common_eval.results_path is not None:
        cfg.common_eval.results_path = os.path.join(cfg.common_eval.results_path, f"rank{rank}")
    if command.expert_parallel_size > 1 and rank > 0:
        cfg.interactive.input = os.devnull  # only rank 0 reads the input
    allocate_gather_buffers(cfg)
    _running.append(command)
    try:
        results = main(cfg, **kwargs)
    except NoSentences:
        logger.warning("rank %d has no sentences to generate from", rank)
    finally:
        _running.pop()
    command.end(results)


def topology_of_opened(
    requested: int, expert_counts: Sequence[int], ranks_per_node: int, is_teacher: bool
) -> Topology:
    """Return which ranks hold which experts of a model that is opened for inference.

    `requested` is the --moe-expert-parallel-size of the model's task; it has no effect in a command on one
    rank. For the other arguments and the errors, see `make_topology`.
    """
    if is_teacher:  # training calls the teacher in step; RUN.topology stays the student's
        return make_topology(expert_counts, requested or 1, ranks_per_node)
    command = running_command()
    if command is None or command.expert_parallel_size == 1:
        if command is None and requested > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            logger.warning(
                "--moe-expert-parallel-size %d has no effect: this process is not connected to the other "
                "ranks and does all of the work; start it with `torchrun … -m fairseq_tutel.run`",
                requested,
            )
        return Topology()
    set_timeout(command.cfg.task)
    topology = make_topology(expert_counts, command.expert_parallel_size, ranks_per_node)
    RUN.update(topology=topology)
    limit_fairseq_groups()
    return topology
