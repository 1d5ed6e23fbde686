"""Predicts the time of collectives from the latency and bandwidth of links (an alpha-beta model)."""

import math

from fairseq_tutel.parallel.machine import PRESETS, Machine
from fairseq_tutel.parallel.strategy import ALGORITHMS


def exchange_seconds(
    bytes_per_rank: float, machine: Machine, nodes: int, local: int, algorithm: str
) -> float:
    """Return the predicted seconds of an all-to-all in which all ranks send equal amounts to all ranks.

    `bytes_per_rank` is the size of a rank's input, including the part that stays on this rank.
    """
    if nodes * local == 1:
        return 0.0
    share = bytes_per_rank / (nodes * local)
    within, across = local - 1, (nodes - 1) * local
    if algorithm == "2dh":
        return (
            2 * machine.launch_s
            + machine.intra.seconds(within, within * nodes * share)
            + machine.inter.seconds(nodes - 1, across * share)
            # 2DH copies all rows twice, and each copy reads and writes each byte.
            + 4 * bytes_per_rank / machine.memory_bytes_per_s
        )
    # The linear all-to-all uses both kinds of links at once, so the slower kind determines the time.
    return machine.launch_s + max(
        machine.intra.seconds(within, within * share), machine.inter.seconds(across, across * share)
    )


def faster_algorithm(machine: Machine | None, nodes: int, local: int, bytes_per_rank: float) -> str:
    """Return the faster all-to-all algorithm, `linear` or `2dh`; if both take equal time, return `linear`.

    If `machine` is None, the typical hardware profile of an A100 is used.
    """
    known = machine or PRESETS["a100"]
    return min(ALGORITHMS, key=lambda a: exchange_seconds(bytes_per_rank, known, nodes, local, a))


def all_gather_seconds(num_bytes: float, machine: Machine, nodes: int, local: int) -> float:
    """Return the predicted seconds of a ring all-gather, or of a ring reduce-scatter.

    `num_bytes` is the number of bytes that one rank contributes.
    """
    ranks = nodes * local
    if ranks == 1:
        return 0.0
    within, across = num_bytes * (ranks - 1) * (local > 1), num_bytes * (ranks - local) / local
    return (
        machine.launch_s
        + machine.intra.alpha_s * (ranks - nodes)
        + machine.inter.alpha_s * (nodes - 1)
        + max(within / machine.intra.bytes_per_s, across / machine.inter.bytes_per_s)
    )


def all_reduce_seconds(num_bytes: float, machine: Machine, nodes: int, local: int) -> float:
    """Return the predicted seconds of an all-reduce by a ring within nodes and a tree between nodes."""
    ranks = nodes * local
    if ranks == 1:
        return 0.0
    within = 2 * num_bytes * (ranks - 1) / ranks * (local > 1)
    across = 2 * num_bytes * (nodes - 1) / nodes / local
    return (
        machine.launch_s
        + machine.intra.alpha_s * 2 * (local - 1)
        + machine.inter.alpha_s * 2 * math.ceil(math.log2(nodes))
        + max(within / machine.intra.bytes_per_s, across / machine.inter.bytes_per_s)
    )
