"""What a configuration says of how a layer runs, before anything is measured.

T tokens, D model_dim, K top_k, s slices of an expert, r ranks that get a row.
"""

from fairseq_tutel.comm.adaptive import allowed_degrees
from fairseq_tutel.comm.cost import faster_algorithm
from fairseq_tutel.comm.how import How
from fairseq_tutel.comm.machine import Machine
from fairseq_tutel.comm.topology import Topology
from fairseq_tutel.config import MoEConfig, label_of

TOKENS = 4096  # of a rank's micro-batch, where nobody says
ROW_BYTES = 4  # of an element of a row, likewise: fp32


def static_how(
    config: MoEConfig,
    topology: Topology,
    tokens: int = TOKENS,
    machine: Machine | None = None,
) -> How:
    """Return how a layer of this configuration runs.

    Args:
        config: of the layer.
        topology: where its experts live.
        tokens: T of a rank, for `a2a_algorithm` auto.
        machine: likewise; None takes an A100's numbers.

    Raises:
        ValueError: an r that these slices do not allow.
    """
    algorithm, grid = config.a2a_algorithm, topology.grid
    degree = static_degree(config, topology.slices(config.num_experts))
    if algorithm == "auto":
        num_bytes = max(degree, 1) * tokens * config.top_k * config.model_dim * ROW_BYTES
        nodes, local = (grid.nodes, grid.local) if grid is not None else (1, 1)
        algorithm = faster_algorithm(
            machine, nodes, local, num_bytes / config.a2a_ffn_overlap_degree
        )
    return How(adaptive_r=degree, overlap=config.a2a_ffn_overlap_degree, algorithm=algorithm)


def static_degree(config: MoEConfig, slices: int) -> int:
    """Return the r that a configuration asks for in a layer of so many slices; larger ones are s.

    Raises:
        ValueError: it is neither 0 nor a divisor of s, or experts need their whole hidden dimension.
    """
    kind = config.parallel_type
    degree = config.adaptive_r
    name, value = "adaptive_r", str(degree)
    if degree < 0:
        name, value = "parallel_type", kind
        degree = slices if kind == "model" else int(kind.partition(":")[2] or 1)
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
