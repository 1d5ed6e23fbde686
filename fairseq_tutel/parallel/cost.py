"""The cost model predicts a training step's time and memory from the speed of links, memory and arithmetic.

A cluster has W ranks on nodes of L ranks. EP groups have P ranks, and a layer has E experts. An expert's
hidden dimension is split over s = max(1, P // E) ranks. The cost model assumes even expert loads and no
other traffic on links. docs/scaling.md has the formulas and sources.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fairseq_tutel.parallel.links import all_gather_seconds, all_reduce_seconds, exchange_seconds
from fairseq_tutel.parallel.machine import Machine
from fairseq_tutel.parallel.strategy import ALGORITHMS, Strategy

OVERLAPS = (1, 2, 4, 8)
HOST = "optimizer state, in host memory"
_COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one rank in one training step: tokens, model sizes and training options."""

    tokens: int  # T, the number of tokens of a rank.
    model_dim: int  # D, the width of a token.
    hidden_dim: int  # H, the hidden dimension of one expert.
    experts: int  # E, the number of experts of a layer on all ranks.
    top_k: int = 2  # K, the number of experts of each token.
    bytes_per_element: int = 2  # Weights, gradients and rows have elements of 2 or 4 bytes.
    glu: bool = False  # Whether experts have three matrices instead of two.
    layers: int = 1  # The number of MoE layers.
    dense_parameters: int = 0  # The number of parameters trained by data parallelism.
    zero_stage: int = 0
    offload: bool = False  # Whether the optimizer state is in host memory.

    @property
    def rows(self) -> int:
        """The number of token-expert assignments on a rank (R)."""
        return self.tokens * self.top_k

    @property
    def matrices(self) -> int:
        """The number of weight matrices of an expert (2 or 3)."""
        return 3 if self.glu else 2

    @property
    def expert_parameters(self) -> int:
        """The number of weights of an expert, without biases."""
        return self.matrices * self.model_dim * self.hidden_dim


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes, ranks and EP groups of a cluster. P divides L, or P is a multiple of L that divides W."""

    nodes: int
    local: int  # L, the number of ranks of a node.
    expert_parallel_size: int  # P, the number of consecutive ranks of an EP group.

    @property
    def world(self) -> int:
        """The number of ranks in the cluster (W)."""
        return self.nodes * self.local

    @property
    def group_local(self) -> int:
        """The number of ranks of an EP group that are on one node."""
        return min(self.expert_parallel_size, self.local)

    @property
    def group_nodes(self) -> int:
        """The number of nodes over which an EP group is spread."""
        return self.expert_parallel_size // self.group_local


class Held(NamedTuple):
    """The bytes that one rank holds for weights, gradients and optimizer state, without activations."""

    weights: int = 0
    gradients: int = 0  # Gradient bytes at the end of the backward pass.
    state: int = 0  # Optimizer state and fp32 master copies on the device.
    host: int = 0  # Optimizer state in host memory.


def held_bytes(
    dense: Iterable[int],  # The number of elements of each dense parameter.
    experts: Iterable[int],  # The number of elements of each expert parameter on this rank.
    world_size: int,
    expert_parallel_size: int,
    stage: int = 0,
    offload: bool = False,
    weight_bytes: int = 2,
) -> Held:
    """Return the bytes of weights, gradients and Adam state on a rank, as docs/scaling.md explains."""
    half, weights, gradients, state = weight_bytes < 4, 0, 0, 0
    for sizes, ranks in ((dense, world_size), (experts, world_size // expert_parallel_size)):
        for numel in sizes:
            own = -(-numel // ranks) if stage > 0 else numel
            weights += weight_bytes * numel
            gradients += weight_bytes * (own if stage == 2 else numel)
            if half and stage == 0 and not offload:
                gradients += 4 * numel  # fairseq's optimizer keeps a full fp32 copy of the gradients.
            # Adam keeps two moments. fp32 weights need a separate master copy only with `offload`.
            state += 4 * own * (2 + (half or offload))
    on_device, on_host = (0, state) if offload else (state, 0)
    return Held(weights, gradients, on_device, on_host)


@dataclass(frozen=True)
class _Layer:
    """The numbers of row copies, stored weights and gathered weights of one MoE layer on a rank."""

    sends_rows: bool  # Whether rows are sent to other ranks.
    copies: int  # The number of copies of each row. Each copy uses H / copies hidden units.
    stored: float  # The number of weights that the rank stores.
    computed: float  # The number of stored and gathered weights with which the rank computes.
    gathering: int  # The number of ranks that gather weights together.


def _layer_of(work: Work, cluster: Cluster, strategy: Strategy) -> _Layer:
    experts, size, r = work.experts, cluster.expert_parallel_size, strategy.adaptive_r
    slices = max(1, size // experts)
    weights = experts * work.expert_parameters
    stored = weights / size
    if r == 0:
        return _Layer(False, 1, stored, weights, size)
    return _Layer(size > 1, r, stored, stored * slices / r, slices // r)


def step_parts(work: Work, machine: Machine, cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    """Return the predicted seconds of each part of a training step (forward and backward, all layers).

    "exchange" is the time of all-to-alls that does not overlap with the experts' computation. One of E and
    P must divide the other. adaptive_r must be 0 or divide s.
    """
    layer, chunks, dense = _layer_of(work, cluster, strategy), strategy.overlap, work.dense_parameters

    def exchange(num_bytes: float) -> float:
        if not layer.sends_rows:
            return 0.0
        shape = cluster.group_nodes, cluster.group_local
        return exchange_seconds(num_bytes, machine, *shape, strategy.algorithm)

    # Only the forward pass exchanges row counts and reads these counts on the host.
    counts_bytes = _COUNT_BYTES * max(work.experts, cluster.expert_parallel_size)
    parts = {
        "gate": 6 * work.tokens * work.model_dim * work.experts / machine.gate_flops_per_s,
        "dispatch and combine": _local_seconds(work, machine, layer),
        "counts": exchange(counts_bytes) + (machine.launch_s if layer.sends_rows else 0.0),
        "exchange": 0.0,
        "experts": 0.0,
        "gather weights": _gather_seconds(work, machine, cluster, layer),
    }
    row_bytes = work.model_dim * work.bytes_per_element
    chunk_exchange = exchange(strategy.adaptive_r * work.rows * row_bytes / chunks)
    forward = _experts_seconds(work, machine, layer, chunks)
    for chunk_experts in (forward, 2 * forward):
        # All-to-alls run one after another, so a pass takes at least their total time.
        longest = max(chunk_exchange, chunk_experts)
        pipelined = max(
            2 * chunks * chunk_exchange, 2 * chunk_exchange + chunk_experts + (chunks - 1) * longest
        )
        parts["experts"] += chunks * chunk_experts
        parts["exchange"] += pipelined - chunks * chunk_experts
    parts = {part: work.layers * seconds for part, seconds in parts.items()}
    # All EP groups of a node sum gradients over EP replicas at the same time, and share the node's links.
    replicas = cluster.world // cluster.expert_parallel_size
    local = cluster.local // cluster.group_local
    expert_s = _gradients_seconds(layer.stored, work, machine, replicas // local, local)
    dense_s = _gradients_seconds(dense, work, machine, cluster.nodes, cluster.local) if dense else 0.0
    return parts | {
        "dense layers": 6 * dense * work.tokens / machine.flops_per_s,
        "expert gradients": work.layers * expert_s,
        "dense gradients": dense_s,
    }


def step_seconds(work: Work, machine: Machine, cluster: Cluster, strategy: Strategy) -> float:
    """Return the predicted seconds of a training step, without the optimizer and data loading."""
    return sum(step_parts(work, machine, cluster, strategy).values())


def memory_bytes(work: Work, cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    """Return the predicted bytes of each kind of data on a rank that trains with Adam.

    All kinds of data except HOST are in device memory. Activations of dense layers are not counted.
    """
    layer = _layer_of(work, cluster, strategy)
    bytes_held = held_bytes(
        [work.dense_parameters],
        [math.ceil(work.layers * layer.stored)],
        cluster.world,
        cluster.expert_parallel_size,
        work.zero_stage if cluster.world > 1 else 0,
        work.offload,
        work.bytes_per_element,
    )
    size, dim, rows = work.bytes_per_element, work.model_dim, work.rows
    saved = work.tokens * dim + rows * (
        (layer.copies + 1) * dim + 2 * (work.matrices - 1) * work.hidden_dim
    )
    buffers = (2 if strategy.algorithm == "linear" else 3) if layer.sends_rows else 0
    return {
        "parameters": bytes_held.weights,
        "gradients": bytes_held.gradients,
        "optimizer state": bytes_held.state,
        HOST: bytes_held.host,
        "activations": work.layers * saved * size,
        "row buffers": buffers * layer.copies * rows * dim * size,
        # All gathered weights are kept for backward. Their gradients exist for one layer at a time.
        "gathered weights": (work.layers + 1) * (layer.computed - layer.stored) * size,
    }


def candidates(work: Work, nodes: int, local: int) -> Iterator[tuple[Cluster, Strategy]]:
    """Yield each possible pair of a cluster configuration and a strategy for a training run.

    The pairs differ in the expert-parallel size, adaptive_r, overlap degree and all-to-all algorithm.
    """
    world = nodes * local
    for size in _divisors(world):
        fits = local % size == 0 or size % local == 0
        if not fits or (work.experts % size and size % work.experts):
            continue
        cluster = Cluster(nodes=nodes, local=local, expert_parallel_size=size)
        if size == 1:  # A group of one rank gathers and exchanges nothing.
            yield cluster, Strategy()
            continue
        yield cluster, Strategy(adaptive_r=0)
        two_levels = cluster.group_nodes > 1 and cluster.group_local > 1
        for copies in _divisors(max(1, size // work.experts)):
            for overlap in OVERLAPS:
                for algorithm in ALGORITHMS if two_levels else ALGORITHMS[:1]:
                    yield cluster, Strategy(adaptive_r=copies, overlap=overlap, algorithm=algorithm)


@dataclass(frozen=True)
class Candidate:
    """A candidate configuration of a training run, with its predicted time and memory."""

    cluster: Cluster
    strategy: Strategy
    parts: dict[str, float]  # The seconds of each part of a training step.
    seconds: float
    memory: dict[str, float]  # The bytes of each kind of data on a rank.
    bytes: float  # The bytes in device memory.
    fits: bool  # Whether the configuration fits in device memory.


def best(work: Work, machine: Machine, nodes: int, local: int) -> list[Candidate]:
    """Return all candidates by predicted time, but candidates that exceed the device memory come last."""
    found = []
    for cluster, strategy in candidates(work, nodes, local):
        parts = step_parts(work, machine, cluster, strategy)
        memory = memory_bytes(work, cluster, strategy)
        num_bytes = sum(memory.values()) - memory[HOST]
        fits = num_bytes <= machine.memory_bytes
        found.append(Candidate(cluster, strategy, parts, sum(parts.values()), memory, num_bytes, fits))
    return sorted(found, key=lambda candidate: (not candidate.fits, candidate.seconds))


def _experts_seconds(work: Work, machine: Machine, layer: _Layer, chunks: int) -> float:
    """Return the predicted seconds that the experts of a rank need for one row chunk.

    Arithmetic overlaps with reads and writes of weights and rows, so the longer of the two times counts.
    """
    rows = work.rows / chunks
    flops = 2 * rows * work.expert_parameters
    width = 2 * layer.copies * work.model_dim + 2 * (work.matrices - 1) * work.hidden_dim
    num_bytes = (layer.computed + rows * width) * work.bytes_per_element
    return max(flops / machine.flops_per_s, num_bytes / machine.memory_bytes_per_s)


def _local_seconds(work: Work, machine: Machine, layer: _Layer) -> float:
    """Return a rank's seconds to read and write rows in dispatch, reordering and combine."""
    dispatch = (1 + layer.copies) * work.rows
    regroup = 4 * layer.copies * work.rows if layer.sends_rows else 0
    combine = layer.copies * work.rows + work.tokens
    # The backward pass has the same memory traffic, plus two reads of all rows for the gate's gradient.
    touched = 2 * (dispatch + regroup + combine) + 2 * work.rows
    return touched * work.model_dim * work.bytes_per_element / machine.memory_bytes_per_s


def _gather_seconds(work: Work, machine: Machine, cluster: Cluster, layer: _Layer) -> float:
    """Return the seconds to all-gather one layer's weights and to reduce-scatter their gradients."""
    tensors = 2 * work.matrices  # Each matrix and each bias has a separate collective.
    size = layer.stored * work.bytes_per_element / tensors
    local = min(layer.gathering, cluster.local)
    gather = all_gather_seconds(size, machine, math.ceil(layer.gathering / local), local)
    return 2 * tensors * gather


def _gradients_seconds(parameters: float, work: Work, machine: Machine, nodes: int, local: int) -> float:
    num_bytes = parameters * work.bytes_per_element
    if work.zero_stage == 0:
        return all_reduce_seconds(num_bytes, machine, nodes, local)
    # In a ring algorithm, a reduce-scatter takes as long as an all-gather.
    return 2 * all_gather_seconds(num_bytes / (nodes * local), machine, nodes, local)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
