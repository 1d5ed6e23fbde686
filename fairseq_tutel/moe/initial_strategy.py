"""What a configuration says of how a layer runs, before anything is measured.

T tokens, D model_dim, K top_k, s slices of an expert, r ranks that get a row.
"""

import torch

from fairseq_tutel.moe.adaptive import allowed_degrees
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.planning.links import faster_algorithm
from fairseq_tutel.planning.machine import Machine, typical
from fairseq_tutel.planning.strategy import Strategy, degree_of
from fairseq_tutel.ranks.groups import Topology

TOKENS = 4096  # of a rank's micro-batch, where nobody says
WIRE_BYTES = {"bf16": 2, "fp8": 1}  # of an element


def static_strategy(
    config: MoEConfig,
    topology: Topology,
    tokens: int = TOKENS,
    machine: Machine | None = None,
    element_bytes: int = 4,
) -> Strategy:
    """Return how a layer of this configuration runs.

    Args:
        config: of the layer.
        topology: where its experts live.
        tokens: T of a rank, for `a2a_algorithm` auto.
        machine: likewise; None takes typical numbers of the device that there is.
        element_bytes: likewise, of an element of a row as it is computed.

    Raises:
        ValueError: an r that these slices do not allow, or that the topology has no groups for.
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
    """Return the r that a configuration asks for in a layer of so many slices; larger ones are s.

    Raises:
        ValueError: it is neither 0 nor a divisor of s, or experts need their whole hidden dimension.
    """
    degree = config.adaptive_r
    name, value = "adaptive_r", str(degree)
    if degree < 0:
        name, value = "parallel_type", config.parallel_type
        degree = degree_of(config.parallel_type, slices) or 0  # which MoEConfig took for one
    degree = min(degree, slices)
    if degree not in allowed_degrees(slices):
        raise ValueError(
            f"{label_of(name)} is {value}, but {slices} ranks hold one expert; give 0 or a divisor of "
            f"{slices}."
        )
    if degree > 1 and config.hidden_layer_norm:
        raise ValueError(
            f"{label_of(name)} is {value}, which would give a rank a part of the hidden dimension, but the "
            "layer norm of --scale-fc needs the whole; give 0 or 1."
        )
    return degree


def is_tuned(config: MoEConfig) -> bool:
    """Whether a configuration leaves something of how a layer runs to the tuner."""
    return "auto" in (config.adaptive, config.parallel_type)
