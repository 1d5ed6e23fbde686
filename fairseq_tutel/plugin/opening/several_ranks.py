"""Runs commands such as fairseq-generate, which use a model for inference, on several ranks.

With --moe-expert-parallel-size P > 1 on the command line, P ranks share each model's experts, and run in
lockstep.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

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


class NoSentences(Exception):  # noqa: N818 - not an error
    """Raised to skip generation on a rank without sentences, where fairseq would divide by zero."""


class Command:
    """A running command, such as fairseq-generate, that uses its models on several ranks."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        # All models use the command line's --moe-expert-parallel-size, not the value in a checkpoint.
        self.expert_parallel_size = read(TaskConfig, cfg.task).moe_expert_parallel_size or 1
        self.lockstep: Lockstep | None = None
        self._turns: dict[MoEFeedForward, int] = {}

    def keep_in_step(self, layers: Sequence[MoEFeedForward]) -> None:
        """If experts are spread over ranks, make MoE layers wait for the same call on other ranks."""
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
        """Block until all ranks call this MoE layer."""
        if layer in self._turns:
            assert self.lockstep is not None
            self.lockstep.wait_for_turn(self._turns[layer])

    def rest(self) -> None:
        """Run this rank's experts for other ranks until no rank runs a model. Collective."""
        if self.lockstep is not None:
            self.lockstep.rest()

    def end(self) -> None:
        """Run this rank's experts for other ranks until all ranks finish the command."""
        if self.lockstep is not None:
            self.lockstep.end()
            logger.info(
                "experts across ranks: %d layer calls for this rank's tokens, %d for other ranks' tokens",
                *(self.lockstep.calls, self.lockstep.served),
            )


# A list with the running command if the command uses models on several ranks, else an empty list.
_running: list[Command] = []


def running_command() -> Command | None:
    """Return the running command if it uses models on several ranks, else None."""
    return _running[-1] if _running else None


def run_on_several_ranks(main: Any, cfg: Any, **kwargs: Any) -> None:
    """Run a command's `main` on this rank's sentences, then run this rank's experts for other ranks."""
    if world.size() == 1:
        main(cfg, **kwargs)
        return
    command, rank = Command(cfg), dist.get_rank()
    if cfg.common_eval.results_path is not None:
        cfg.common_eval.results_path = os.path.join(cfg.common_eval.results_path, f"rank{rank}")
    if command.expert_parallel_size > 1 and rank > 0:
        cfg.interactive.input = os.devnull  # Only rank 0 reads the input.
    allocate_gather_buffers(cfg)
    _running.append(command)
    try:
        main(cfg, **kwargs)
    except NoSentences:
        logger.warning("rank %d has no sentences to generate from", rank)
    finally:
        _running.pop()
    command.end()


def topology_of_opened(
    requested: int, expert_counts: Sequence[int], ranks_per_node: int, is_teacher: bool
) -> Topology:
    """Return which ranks hold which experts of a model that is opened for inference.

    `requested` is the --moe-expert-parallel-size of the model's task. Only a teacher uses this size; other
    models use the command line's size. `make_topology` documents the other arguments and the errors.
    """
    if is_teacher:  # RUN.topology must remain that of the student.
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
