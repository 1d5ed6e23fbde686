"""A model that is opened for use: on one rank with all its experts, or on several that share them."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.plugin import parallel_inference
from fairseq_tutel.plugin.agreement import limit_fairseqs_own, set_timeout
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers
from fairseq_tutel.ranks.agreement import agree
from fairseq_tutel.ranks.groups import Topology, make_topology

logger = logging.getLogger(__name__)


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
    command = parallel_inference.running()
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
    command, layers = parallel_inference.running(), moe_layers(model)
    if command is not None and layers[0].topology.expert_parallel_size > 1:
        agree(_facts_of(layers))
        command.keep_in_step(layers)


def _facts_of(layers: Sequence[MoEFeedForward]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        label_of(field.name): [getattr(layer.config, field.name) for layer in layers]
        for field in fields(MoEConfig)
    }
    facts["the layers with experts"] = [layer.name for layer in layers]
    facts["how rows cross ranks"] = [str(layer.how) for layer in layers]
    return facts
