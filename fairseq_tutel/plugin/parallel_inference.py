"""A command that uses a model, such as fairseq-generate, on several ranks: what they do for each other.

With --moe-expert-parallel-size P > 1 on the command line, P ranks share the experts of every model that the
command opens, in lockstep until all of them are done. Here is the state of the command that runs, where the
experts of a model live that is opened, and the perplexity of all ranks: fairseq-eval-lm logs that of the
first one's part.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fairseq_tutel.inference.lockstep import Lockstep
from fairseq_tutel.moe.config import MoEConfig, TaskConfig, label_of
from fairseq_tutel.moe.options import read
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers
from fairseq_tutel.plugin.startup import let_stock_gather, limit_fairseqs_own, set_timeout
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.agreement import agree
from fairseq_tutel.ranks.groups import Topology, make_topology

logger = logging.getLogger(__name__)


class Scored:
    """The batches that fairseq-eval-lm scores, and for how many tokens it divides by.

    Args:
        batches: with a length, of samples of a language model; empty ones hold nothing.
        dictionary: of the targets.
        cfg: the command's FairseqConfig.
    """

    def __init__(self, batches: Any, dictionary: Any, cfg: Any) -> None:
        self.batches, self.pad = batches, dictionary.pad()
        self.tokens = 0
        self.without_first = bool(getattr(cfg.task, "add_bos_token", False))
        # A word in pieces counts once.
        mark = cfg.common_eval.post_process
        marked = mark in ("subword_nmt", "@@ ")
        self.goes_on = torch.tensor(
            [marked and word.endswith(mark.rstrip()) for word in dictionary.symbols]
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for sample in self.batches:
            if "net_input" in sample:
                self.tokens += self._tokens(sample["target"])
            yield sample

    def _tokens(self, targets: Iterable[torch.Tensor]) -> int:
        total = 0
        for target in targets:
            words = target[target != self.pad].cpu()[int(self.without_first) :]
            total += len(words) - int(self.goes_on[words[:-1]].sum())
        return total


def tell_of_all_ranks(results: dict[str, Any], tokens: int) -> None:
    """Log the loss and the perplexity of all ranks' tokens. Collective.

    Args:
        results: what fairseq-eval-lm's `main` returned on this rank: the mean loss of its tokens, in bits.
        tokens: how many they were.

    Raises:
        ValueError: no rank had any.
    """
    own = float(results["loss"]) * tokens, tokens
    parts = world.told_by_all(own, "the gathering of all ranks' losses")
    total = sum(count for _, count in parts)
    if total == 0:
        raise ValueError(
            "no rank scored any token, so there is no perplexity: fairseq-eval-lm skips what is longer "
            "than the model's positions; give the --tokens-per-sample that the model was trained with."
        )
    loss = sum(bits for bits, _ in parts) / total
    logger.info(
        "all %d ranks: %s tokens, Loss (base 2): %.4f, Perplexity: %.2f",
        len(parts),
        f"{total:,}",
        loss,
        2**loss,
    )


class NoSentences(Exception):  # noqa: N818 - nothing is wrong
    """This rank has nothing to generate from, and stock would divide by the time that it took."""


@dataclass
class Command:
    """What runs: its FairseqConfig, and what it has opened so far."""

    cfg: Any
    lockstep: Lockstep | None = None
    scored: Scored | None = None

    @property
    def expert_parallel_size(self) -> int:
        """P of the command line, for all models alike: a checkpoint's own is of its training."""
        return read(TaskConfig, self.cfg.task).moe_expert_parallel_size or 1

    def keep_in_step(self, layers: Sequence[MoEFeedForward]) -> None:
        """Let layers whose experts are shared wait for their turn."""
        if self.lockstep is None:
            self.lockstep = Lockstep(layers[0].topology.expert_group)
        lockstep, turns = (
            self.lockstep,
            {layer: self.lockstep.add(layer.run_without_tokens) for layer in layers},
        )
        layers[0].context.take_turns(lambda layer: lockstep.wait_for_turn(turns[layer]))

    def count(self, batches: Any, dictionary: Any) -> Scored:
        """Return batches that fairseq-eval-lm scores, whose tokens are counted."""
        self.scored = Scored(batches, dictionary, self.cfg)
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
            tell_of_all_ranks(results, self.scored.tokens)


_running: list[Command] = []


def running() -> Command | None:
    """Return the command that uses models on several ranks; None in a training, or on one rank."""
    return _running[0] if _running else None


def run_on_several_ranks(main: Any, cfg: Any, **kwargs: Any) -> None:
    """Run a command's `main` on this rank's sentences, then serve the other ranks until they are done."""
    if world.size() == 1:
        main(cfg, **kwargs)
        return
    command, results = Command(cfg), None
    _give_own_files(command)
    let_stock_gather(cfg)
    _running[:] = [command]
    try:
        try:
            results = main(cfg, **kwargs)
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


_beside: list[bool] = []


@contextlib.contextmanager
def beside_a_training() -> Iterator[None]:
    """Open models in the block for a training's ranks, all of which will call them equally often."""
    _beside.append(True)
    try:
        yield
    finally:
        _beside.pop()


def topology_of_opened(
    requested: int,
    expert_counts: Sequence[int],
    ranks_per_node: int,
    degree_of: Callable[[int], int] | None,
) -> Topology:
    """Return where the experts of a model that is opened live. Collective where ranks share them.

    Args:
        requested: P of the model's task, which a command on one rank may have in vain.
        expert_counts: as in `make_topology`, and the two that follow.
        ranks_per_node: L.
        degree_of: the r of a layer.

    Raises:
        ValueError: a --moe-expert-parallel-size that fits neither the ranks nor the experts.
        CommunicationError: a rank did not come.
    """
    command = running()
    if _beside:
        return make_topology(expert_counts, requested or 1, ranks_per_node, degree_of, beside=True)
    if command is None or command.expert_parallel_size == 1:
        if command is None and requested > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            logger.warning(
                "--moe-expert-parallel-size %d has no effect: this process has not met the others and does "
                "all of the work; start it with `torchrun … -m fairseq_tutel.run`",
                requested,
            )
        return Topology()
    set_timeout(command.cfg.task)
    topology = make_topology(expert_counts, command.expert_parallel_size, ranks_per_node, degree_of)
    limit_fairseqs_own()
    return topology


def keep_in_step(model: nn.Module) -> None:
    """Let the layers of a model that is opened wait for each other's ranks, where these share experts.

    Raises:
        ValueError: ranks opened different models.
    """
    command, layers = running(), moe_layers(model)
    if command is not None and layers[0].topology.expert_parallel_size > 1:
        agree(_facts_of(layers))
        command.keep_in_step(layers)


def _facts_of(layers: Sequence[MoEFeedForward]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        label_of(field.name): [getattr(layer.config, field.name) for layer in layers]
        for field in fields(MoEConfig)
    }
    facts["the layers with experts"] = [layer.name for layer in layers]
    facts["how rows cross ranks"] = [str(layer.strategy) for layer in layers]
    return facts
