"""The strategy that a configuration gives a layer, and the predicted seconds of any strategy.

T tokens, D model_dim, K top_k, s shards of an expert, r ranks to which a row is sent.
"""

from dataclasses import replace

import torch

from fairseq_tutel.moe.adaptive import allowed_degrees, nearest_degree
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.planning.cost import Cluster, Work, step_seconds
from fairseq_tutel.planning.links import faster_algorithm
from fairseq_tutel.planning.machine import Machine, typical
from fairseq_tutel.planning.strategy import Strategy, degree_of
from fairseq_tutel.ranks.groups import Topology

TOKENS = 4096  # default for a rank's micro-batch
WIRE_BYTES = {"bf16": 2, "fp8": 1}  # bytes of an element by transfer dtype


def static_strategy(
    config: MoEConfig,
    topology: Topology,
    tokens: int = TOKENS,
    machine: Machine | None = None,
    element_bytes: int = 4,
) -> Strategy:
    """Return the strategy of a layer. The last three arguments choose the algorithm if it is auto.

    Args:
        config: configuration of the layer.
        topology: its groups.
        tokens: T of a rank.
        machine: hardware profile; None: a typical one of this device.
        element_bytes: bytes of an element of a row.

    Raises:
        ValueError: r does not fit the shards, or the topology has no groups for it.
    """
    algorithm, grid = config.a2a_algorithm, topology.grid
    slices, overlap = topology.slices(config.num_experts), config.a2a_ffn_overlap_degree
    degree = static_degree(config, slices)
    if degree > 0:
        topology.share_group(slices, degree)
    if algorithm == "auto" and grid is None:
        algorithm = "linear"
    elif algorithm == "auto" and grid is not None:
        width = min(WIRE_BYTES.get(config.a2a_dtype, element_bytes), element_bytes)
        num_bytes = max(degree, 1) * tokens * config.top_k * config.model_dim * width / overlap
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        known = machine or typical(gpu)
        algorithm = faster_algorithm(known, grid.nodes, grid.local, num_bytes)
    return Strategy(adaptive_r=degree, overlap=overlap, algorithm=algorithm)


def static_degree(config: MoEConfig, slices: int) -> int:
    """Return the configured r of a layer with `slices` shards of an expert, at most s.

    Raises:
        ValueError: r is neither 0 nor a divisor of s, or experts need their whole hidden dimension.
    """
    degree = config.adaptive_r
    name, value = "adaptive_r", str(degree)
    if degree < 0:
        name, value = "parallel_type", config.parallel_type
        degree = degree_of(config.parallel_type, slices) or 0  # MoEConfig has checked it
    degree = min(degree, slices)
    if degree not in allowed_degrees(slices):
        raise ValueError(
            f"{label_of(name)} is {value}, but {slices} ranks hold one expert; give 0 or a divisor of "
            f"{slices}."
        )
    if degree > 1 and config.hidden_layer_norm:
        raise ValueError(
            f"{label_of(name)} is {value}, which splits the hidden dimension, but the layer norm of "
            "--scale-fc needs the whole; give 0 or 1."
        )
    return degree


def predicted_seconds(
    config: MoEConfig,
    topology: Topology,
    strategy: Strategy,
    tokens: int,
    machine: Machine,
    element_bytes: int,
) -> float:
    """Return the seconds of a layer's forward and backward by the cost model; plans count as linear."""
    grid, size = topology.grid, topology.expert_parallel_size
    nodes, local = (grid.nodes, grid.local) if grid else (1, size)
    slices = topology.slices(config.num_experts)
    degree = nearest_degree(strategy.adaptive_r, slices, config.hidden_layer_norm)
    algorithm = "linear" if strategy.plan else strategy.algorithm
    work = Work(
        tokens=tokens,
        model_dim=config.model_dim,
        hidden_dim=config.hidden_dim,
        experts=config.num_experts,
        top_k=config.top_k,
        bytes_per_element=element_bytes,
        glu=config.expert_type == "glu",
    )
    cluster = Cluster(nodes=nodes, local=local, expert_parallel_size=size)
    return step_seconds(work, machine, cluster, replace(strategy, adaptive_r=degree, algorithm=algorithm))


def is_tuned(config: MoEConfig) -> bool:
    """Whether the tuner chooses any part of the strategy."""
    return "auto" in (config.adaptive, config.parallel_type)
