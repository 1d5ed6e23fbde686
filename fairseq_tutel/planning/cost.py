"""Cost model: seconds and bytes of a training step on any cluster (an alpha-beta-gamma model).

W ranks on nodes of L, expert-parallel size P, E experts; s = max(1, P // E) ranks share an expert's hidden
dimension. T tokens of a rank, D model_dim, H hidden_dim, K experts of a token, R = T * K rows. Load is even
and links have no other traffic. Times of collectives: `links`. Formulas and sources: docs/scaling.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fairseq_tutel.planning.links import all_gather_seconds, all_reduce_seconds, exchange_seconds
from fairseq_tutel.planning.machine import Machine
from fairseq_tutel.planning.memory import Held, held_bytes
from fairseq_tutel.planning.strategy import ALGORITHMS, Strategy

OVERLAPS = (1, 2, 4, 8)
_COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Work:
    """The computation of one rank in a step."""

    tokens: int  # T
    model_dim: int  # D
    hidden_dim: int  # H of one expert
    experts: int  # E of a layer, over all ranks
    top_k: int = 2  # K
    bytes_per_element: int = 2  # of weights, gradients and rows: 2 or 4
    glu: bool = False  # experts have three matrices instead of two
    layers: int = 1  # MoE layers
    dense_parameters: int = 0  # trained by data parallelism
    zero_stage: int = 0
    offload: bool = False  # optimizer state is in host memory

    @property
    def rows(self) -> int:
        """R, the token-expert assignments of a rank."""
        return self.tokens * self.top_k

    @property
    def matrices(self) -> int:
        """Matrices of an expert."""
        return 3 if self.glu else 2

    @property
    def expert_parameters(self) -> int:
        """Number of weights of one expert."""
        return self.matrices * self.model_dim * self.hidden_dim


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, ranks and EP groups.

    Attributes:
        nodes: number of nodes.
        local: L, ranks of a node.
        expert_parallel_size: P, consecutive ranks: a part of a node, or whole nodes.

    Raises:
        ValueError: P is neither a divisor of L nor whole nodes that divide W.
    """

    nodes: int
    local: int
    expert_parallel_size: int

    def __post_init__(self) -> None:
        size, part = self.expert_parallel_size, min(self.expert_parallel_size, self.local)
        if size < 1 or self.world % size or self.local % part or size % part:
            raise ValueError(
                f"expert_parallel_size is {size}, which is neither a divisor of the {self.local} ranks "
                f"of a node nor whole nodes that divide the {self.world} ranks; give one that is."
            )

    @property
    def world(self) -> int:
        """W."""
        return self.nodes * self.local

    @property
    def group_local(self) -> int:
        """Ranks of an EP group in one node."""
        return min(self.expert_parallel_size, self.local)

    @property
    def group_nodes(self) -> int:
        """Nodes of an EP group."""
        return self.expert_parallel_size // self.group_local

    def slices(self, experts: int) -> int:
        """Return s, the ranks that share an expert's hidden dimension."""
        return max(1, self.expert_parallel_size // experts)


def experts_seconds(
    work: Work, machine: Machine, cluster: Cluster, strategy: Strategy, *, backward: bool = False
) -> float:
    """Return the seconds of one row chunk in a layer's experts.

    The maximum of arithmetic and of memory traffic of weights and rows. Backward takes twice as long.
    """
    chunk = work.rows / strategy.overlap
    copies = max(1, strategy.adaptive_r)  # of a row, each with hidden_dim / copies
    flops = 2 * chunk * work.expert_parameters
    width = 2 * copies * work.model_dim + 2 * (work.matrices - 1) * work.hidden_dim
    num_bytes = _computed_parameters(work, cluster, strategy) + chunk * width
    seconds = max(
        flops / machine.flops_per_s, num_bytes * work.bytes_per_element / machine.memory_bytes_per_s
    )
    return 2 * seconds if backward else seconds


def step_parts(work: Work, machine: Machine, cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    """Return the seconds of each part of a step: forward and backward of all layers.

    "exchange" is the part of all-to-alls that is not overlapped with the experts.

    Raises:
        ValueError: the experts do not fit the ranks; see `refuse`.
    """
    refuse(work, cluster, strategy)
    # Forward exchanges the counts of rows and reads them on the host; backward reuses them.
    counts_bytes = _COUNT_BYTES * max(work.experts, cluster.expert_parallel_size)
    host_read_s = machine.launch_s if _sends_rows(cluster, strategy) else 0.0
    layer = {
        "gate": _gate_seconds(work, machine),
        "dispatch and combine": _local_seconds(work, machine, cluster, strategy),
        "counts": _exchange_seconds(counts_bytes, machine, cluster, strategy) + host_read_s,
        "exchange": 0.0,
        "experts": 0.0,
        "gather weights": _gather_seconds(work, machine, cluster, strategy),
    }
    row_bytes = work.model_dim * work.bytes_per_element
    chunk_bytes = strategy.adaptive_r * work.rows * row_bytes / strategy.overlap
    exchange = _exchange_seconds(chunk_bytes, machine, cluster, strategy)
    for backward in (False, True):
        chunk = experts_seconds(work, machine, cluster, strategy, backward=backward)
        layer["experts"] += strategy.overlap * chunk
        layer["exchange"] += _pipelined(exchange, chunk, strategy.overlap) - strategy.overlap * chunk
    dense = work.dense_parameters
    return {
        **{part: work.layers * seconds for part, seconds in layer.items()},
        "dense layers": 6 * dense * work.tokens / machine.flops_per_s,
        "expert gradients": work.layers * _replica_seconds(work, machine, cluster),
        "dense gradients": _gradients_seconds(dense, work, machine, cluster.nodes, cluster.local)
        if dense
        else 0.0,
    }


def step_seconds(work: Work, machine: Machine, cluster: Cluster, strategy: Strategy) -> float:
    """Return the seconds of a step, without optimizer and data loading."""
    return sum(step_parts(work, machine, cluster, strategy).values())


def memory_bytes(work: Work, cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    """Return a rank's bytes on its device by kind, as if all were allocated at once.

    Activations are those of the MoE layers. The optimizer is Adam.
    """
    refuse(work, cluster, strategy)
    size = work.bytes_per_element
    stored = _stored_parameters(work, cluster)
    bytes_held = held(work, cluster)
    gathered = _computed_parameters(work, cluster, strategy) - stored
    copies = max(1, strategy.adaptive_r)
    rows_bytes = copies * work.rows * work.model_dim * size
    saved = work.tokens * work.model_dim + work.rows * (
        (copies + 1) * work.model_dim + 2 * (work.matrices - 1) * work.hidden_dim
    )
    buffers = (2 if strategy.algorithm == "linear" else 3) if _sends_rows(cluster, strategy) else 0
    return {
        "parameters": bytes_held.weights,
        "gradients": bytes_held.gradients,
        "optimizer state": bytes_held.state,
        "activations": work.layers * saved * size,
        "row buffers": buffers * rows_bytes,
        # Gathered weights of all layers are kept for backward, with the gradients of one layer.
        "gathered weights": (work.layers + 1) * gathered * size,
    }


def refuse(work: Work, cluster: Cluster, strategy: Strategy) -> None:
    """Check that a layer can run like this.

    Raises:
        ValueError: neither of E and P divides the other, or r is not 0 or a divisor of s.
    """
    experts, size = work.experts, cluster.expert_parallel_size
    if experts % size and size % experts:
        raise ValueError(
            f"expert_parallel_size is {size} for {experts} experts; one must divide the other."
        )
    slices = cluster.slices(experts)
    if strategy.adaptive_r and slices % strategy.adaptive_r:
        raise ValueError(
            f"adaptive_r is {strategy.adaptive_r}, which is neither 0 nor a divisor of the {slices} "
            "rank(s) that share an expert; give one that is."
        )


def candidates(work: Work, nodes: int, local: int) -> Iterator[tuple[Cluster, Strategy]]:
    """Yield all (P, r, d, algorithm) with which the layers can run."""
    world = nodes * local
    for size in _divisors(world):
        fits = local % size == 0 or size % local == 0
        if not fits or (work.experts % size and size % work.experts):
            continue
        cluster = Cluster(nodes=nodes, local=local, expert_parallel_size=size)
        if size == 1:  # no gathering and no all-to-all
            yield cluster, Strategy()
            continue
        yield cluster, Strategy(adaptive_r=0)
        two_levels = cluster.group_nodes > 1 and cluster.group_local > 1
        for copies in _divisors(cluster.slices(work.experts)):
            for overlap in OVERLAPS:
                for algorithm in ALGORITHMS if two_levels else ALGORITHMS[:1]:
                    yield cluster, Strategy(adaptive_r=copies, overlap=overlap, algorithm=algorithm)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration with its seconds by part, its bytes by kind, and whether it fits in memory."""

    cluster: Cluster
    strategy: Strategy
    parts: dict[str, float]
    memory: dict[str, float]
    host: int
    fits: bool

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> float:
        """Bytes of a rank's device memory."""
        return sum(self.memory.values())


def best(work: Work, machine: Machine, nodes: int, local: int) -> list[Candidate]:
    """Return all candidates from fast to slow, those that fit in memory first."""
    found = []
    for cluster, strategy in candidates(work, nodes, local):
        memory = memory_bytes(work, cluster, strategy)
        found.append(
            Candidate(
                cluster=cluster,
                strategy=strategy,
                parts=step_parts(work, machine, cluster, strategy),
                memory=memory,
                host=held(work, cluster).host,
                fits=sum(memory.values()) <= machine.memory_bytes,
            )
        )
    return sorted(found, key=lambda candidate: (not candidate.fits, candidate.seconds))


def _stored_parameters(work: Work, cluster: Cluster) -> float:
    """Return the number of weights of one layer that a rank stores; it does not depend on r."""
    return work.experts * work.expert_parameters / cluster.expert_parallel_size


def _computed_parameters(work: Work, cluster: Cluster, strategy: Strategy) -> float:
    """Return the number of weights of one layer that a rank computes with, including gathered ones."""
    if strategy.adaptive_r == 0:
        return work.experts * work.expert_parameters
    slices = cluster.slices(work.experts)
    return _stored_parameters(work, cluster) * slices / strategy.adaptive_r


def _gate_seconds(work: Work, machine: Machine) -> float:
    flops = 2 * work.tokens * work.model_dim * work.experts
    return 3 * flops / machine.gate_flops_per_s


def _sends_rows(cluster: Cluster, strategy: Strategy) -> bool:
    """Whether rows are sent to other ranks."""
    return strategy.adaptive_r > 0 and cluster.expert_parallel_size > 1


def _local_seconds(work: Work, machine: Machine, cluster: Cluster, strategy: Strategy) -> float:
    """Return the seconds to read and write rows in dispatch, regroup and combine."""
    copies = max(1, strategy.adaptive_r)
    dispatch = (1 + copies) * work.rows
    regroup = 4 * copies * work.rows if _sends_rows(cluster, strategy) else 0
    combine = copies * work.rows + work.tokens
    # Backward mirrors them, and reads the rows twice more for the gate's gradient.
    touched = 2 * (dispatch + regroup + combine) + 2 * work.rows
    return touched * work.model_dim * work.bytes_per_element / machine.memory_bytes_per_s


def _exchange_seconds(num_bytes: float, machine: Machine, cluster: Cluster, strategy: Strategy) -> float:
    """Return the seconds of one all-to-all of the EP group, 0 if no rows are sent."""
    if not _sends_rows(cluster, strategy):
        return 0.0
    nodes, local = cluster.group_nodes, cluster.group_local
    return exchange_seconds(num_bytes, machine, nodes, local, strategy.algorithm)


def _pipelined(exchange: float, experts: float, chunks: int) -> float:
    """Return the seconds of dispatch, experts and combine of all chunks, with one all-to-all at a time."""
    by_link = 2 * chunks * exchange
    return max(by_link, 2 * exchange + experts + (chunks - 1) * max(exchange, experts))


def _gather_seconds(work: Work, machine: Machine, cluster: Cluster, strategy: Strategy) -> float:
    """Return the seconds to gather one layer's weights and to reduce-scatter their gradients.

    Each matrix and each bias is a collective of its own.
    """
    slices = cluster.slices(work.experts)
    ranks = slices // strategy.adaptive_r if strategy.adaptive_r else cluster.expert_parallel_size
    tensors = 2 * work.matrices
    size = _stored_parameters(work, cluster) * work.bytes_per_element / tensors
    local = min(ranks, cluster.local)
    nodes = math.ceil(ranks / local)
    gather = all_gather_seconds(size, machine, nodes, local)
    return _gathers_of_both(machine) * tensors * gather


def _replica_seconds(work: Work, machine: Machine, cluster: Cluster) -> float:
    """Return the seconds to sum one layer's expert gradients over EP replicas.

    All ranks of a node do so at once.
    """
    replicas = cluster.world // cluster.expert_parallel_size
    local = cluster.local // cluster.group_local
    stored = _stored_parameters(work, cluster)
    return _gradients_seconds(stored, work, machine, replicas // local, local, cluster.local)


def _gradients_seconds(
    parameters: float,
    work: Work,
    machine: Machine,
    nodes: int,
    local: int,
    on_link: int | None = None,
) -> float:
    """Return the seconds to sum gradients over ranks and, with ZeRO, to gather updated weights."""
    num_bytes = parameters * work.bytes_per_element
    if work.zero_stage == 0:
        return all_reduce_seconds(num_bytes, machine, nodes, local, on_link)
    share = num_bytes / (nodes * local)
    return _gathers_of_both(machine) * all_gather_seconds(share, machine, nodes, local, on_link)


def _gathers_of_both(machine: Machine) -> int:
    """Return the cost of an all-gather and a reduce-scatter, in all-gathers."""
    return 3 if machine.reduce_scatter_as_all_reduce else 2


def held(work: Work, cluster: Cluster) -> Held:
    """Return a rank's bytes of parameters, gradients and optimizer state."""
    return held_bytes(
        [work.dense_parameters],
        [math.ceil(work.layers * _stored_parameters(work, cluster))],
        cluster.world,
        cluster.expert_parallel_size,
        work.zero_stage if cluster.world > 1 else 0,
        work.offload,
        work.bytes_per_element,
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
