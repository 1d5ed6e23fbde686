"""A command that uses a model on several ranks, such as fairseq-generate.

With --moe-expert-parallel-size P > 1 on the command line, P ranks share the experts of every model that the
command opens, and run in lockstep. fairseq-eval-lm logs each rank's perplexity; that of all is logged here.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from fairseq_tutel.inference.lockstep import Lockstep
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.moe.option_table import TaskConfig
from fairseq_tutel.options.option import read
from fairseq_tutel.plugin.feed_forward import MoEFeedForward
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.startup import allocate_gather_buffers, limit_fairseq_groups, set_timeout
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.agreement import agree
from fairseq_tutel.ranks.groups import Topology, make_topology

logger = logging.getLogger(__name__)


class Scored:
    """The batches that fairseq-eval-lm scores, with the number of tokens that it divides by."""

    def __init__(self, batches: Any, dictionary: Any, cfg: Any) -> None:
        self.batches, self.pad = batches, dictionary.pad()
        self.tokens = 0
        self.without_first = bool(getattr(cfg.task, "add_bos_token", False))
        # The pieces of a word count as one.
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
    """Log the loss and the perplexity of all ranks' tokens. Collective."""
    own = float(results["loss"]) * tokens, tokens
    parts = world.all_gather_object(own, "the gathering of all ranks' losses")
    total = sum(count for _, count in parts)
    if total == 0:
        raise ValueError(
            "no rank scored any token, so there is no perplexity: fairseq-eval-lm skips what is longer "
            "than the model's positions; give the --tokens-per-sample that the model was trained with."
        )
    loss = sum(bits for bits, _ in parts) / total
    logger.info(
        "all %d ranks: %s tokens, Loss (base 2): %.4f, Perplexity: %.2f",
        *(len(parts), f"{total:,}", loss, 2**loss),
    )


class NoSentences(Exception):  # noqa: N818 - no error
    """This rank has nothing to generate from; fairseq would divide by the time that generation took."""


class Command:
    """A command that uses models on several ranks, with the objects that it has opened so far."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        # Of the command line, for all models; a checkpoint's own is ignored.
        self.expert_parallel_size = read(TaskConfig, cfg.task).moe_expert_parallel_size or 1
        self.lockstep: Lockstep | None = None
        self.scored: Scored | None = None
        self._turns: dict[MoEFeedForward, int] = {}

    def keep_in_step(self, layers: Sequence[MoEFeedForward]) -> None:
        """Let the layers of a model wait for the other ranks' calls, if ranks share its experts."""
        if layers[0].topology.expert_parallel_size == 1:
            return
        facts: dict[str, Any] = {
            label_of(field.name): [getattr(layer.config, field.name) for layer in layers]
            for field in fields(MoEConfig)
        }
        facts["the layers with experts"] = [layer.name for layer in layers]
        facts["how rows cross ranks"] = [str(layer.strategy) for layer in layers]
        agree(facts)
        if self.lockstep is None:
            self.lockstep = Lockstep(layers[0].topology.expert_group)
        self._turns |= {layer: self.lockstep.add(layer.run_without_tokens) for layer in layers}

    def wait_for_turn(self, layer: MoEFeedForward) -> None:
        """Return when all ranks agree on this layer's call."""
        if layer in self._turns:
            assert self.lockstep is not None
            self.lockstep.wait_for_turn(self._turns[layer])

    def count(self, batches: Any, dictionary: Any) -> Scored:
        """Return the batches of fairseq-eval-lm, wrapped in a counter of their tokens."""
        self.scored = Scored(batches, dictionary, self.cfg)
        return self.scored

    def rest(self) -> None:
        """Serve the other ranks until none is in a model; all ranks call this equally often."""
        if self.lockstep is not None:
            self.lockstep.rest()

    def end(self, results: Any) -> None:
        """Serve the other ranks until all have finished; then log common results."""
        if self.lockstep is not None:
            self.lockstep.end()
            logger.info(
                "experts across ranks: %d calls of layers for this rank's tokens, %d for those of others",
                *(self.lockstep.calls, self.lockstep.served),
            )
        if self.scored is not None:
            log_perplexity(results, self.scored.tokens)


def run_on_several_ranks(main: Any, cfg: Any, **kwargs: Any) -> None:
    """Run a command's `main` on this rank's sentences, then serve the other ranks until they finish."""
    if world.size() == 1:
        main(cfg, **kwargs)
        return
    command, rank, results = Command(cfg), dist.get_rank(), None
    if cfg.common_eval.results_path is not None:
        cfg.common_eval.results_path = os.path.join(cfg.common_eval.results_path, f"rank{rank}")
    if command.expert_parallel_size > 1 and rank > 0:
        cfg.interactive.input = os.devnull  # rank 0 reads it
    allocate_gather_buffers(cfg)
    with RUN.having(command=command):
        try:
            results = main(cfg, **kwargs)
        except NoSentences:
            logger.warning("rank %d has no sentences of its own", rank)
        command.end(results)


def topology_of_opened(
    requested: int,
    expert_counts: Sequence[int],
    ranks_per_node: int,
    degree_of: Callable[[int], int] | None,
) -> Topology:
    """Return the topology of a model that is opened. Collective where ranks share its experts.

    `requested`, the P of the model's task, has no effect in a command on one rank. For the other arguments
    and for errors see `make_topology`.
    """
    if RUN.opens_teacher:  # it is called in step with the student; RUN.topology stays the student's
        return make_topology(expert_counts, requested or 1, ranks_per_node, degree_of)
    command = RUN.command
    if command is None or command.expert_parallel_size == 1:
        if command is None and requested > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            logger.warning(
                "--moe-expert-parallel-size %d has no effect: this process is not connected to the others "
                "and does all of the work; start it with `torchrun … -m fairseq_tutel.run`",
                requested,
            )
        return Topology()
    set_timeout(command.cfg.task)
    topology = make_topology(expert_counts, command.expert_parallel_size, ranks_per_node, degree_of)
    RUN.update(topology=topology)
    limit_fairseq_groups()
    return topology
