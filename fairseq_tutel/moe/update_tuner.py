"""Chooses an execution strategy for each update, as Tutel does (Hwang et al. 2023, section 3.3)."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from fairseq_tutel.moe.adaptive import allowed_degrees, nearest_degree
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.option import require
from fairseq_tutel.parallel import host_memory, world
from fairseq_tutel.parallel.collectives import all_reduce
from fairseq_tutel.parallel.cost import OVERLAPS, Cluster, Work, step_seconds
from fairseq_tutel.parallel.machine import Machine, typical
from fairseq_tutel.parallel.rendezvous import ranks_per_node
from fairseq_tutel.parallel.search import StrategySearch
from fairseq_tutel.parallel.strategy import ALGORITHMS, Strategy

logger = logging.getLogger(__name__)

# A bucket is a range of expert capacities for which the tuner chooses one strategy.
WIDENING = 0.25  # A bucket's width is at least this fraction of its lower end.
WARM_UPDATES = 2  # Update 1 allocates optimizer state. Update 2 measures peak memory.
WINDOW = 128  # A bucket's width is at least this number of slots of an expert.


class UpdateTuner:
    """Chooses an execution strategy for the MoE layers of a model in every training update.

    On every rank, call `begin` before the first micro-batch of an update, `add_micro_batch` before each
    later micro-batch, and `end` after the last backward pass. Each call of `begin` runs one small
    all-reduce over all ranks and one host synchronization. The first updates use the configured strategy,
    because free memory must be measured before a choice.

    Args:
        layers: all MoE layers of one model, on ranks that exchange tokens.
        window: the least width of a bucket of capacities (R in Tutel's paper), in slots of an expert.
        overlaps: the overlap degrees to choose from.
        algorithms: the all-to-all algorithms to choose from; None for all algorithms that the ranks allow.
        machine: the hardware profile for predictions, which limit the candidates; None for a typical one.

    Raises:
        ValueError: there is nothing to choose, because every rank has all experts.

    Example:
        >>> topology = ft.make_topology([8])  # on each of several ranks
        >>> config = ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8)
        >>> layer = ft.MoELayer(config, topology, seed=1)
        >>> tuner = ft.UpdateTuner([layer])
        >>> for x in torch.randn(3, 10, 64):  # three updates of ten tokens
        ...     strategy = tuner.begin(len(x))
        ...     y, output = layer(x)
        ...     (y.sum() + output.balance_loss).backward()
        ...     tuner.end()
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        window: int = WINDOW,
        overlaps: Sequence[int] = OVERLAPS,
        algorithms: Sequence[str] | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.layers, self.window = list(layers), window
        first = self.layers[0]
        require(
            first.topology.expert_parallel_size > 1,
            "UpdateTuner has nothing to choose: every rank has all experts; give layers whose topology has "
            "an expert_parallel_size above 1.",
        )
        if algorithms is None:
            algorithms = ALGORITHMS if first.topology.grid is not None else ALGORITHMS[:1]
        self.static = first.strategy
        self._pairs, self._machine = (tuple(overlaps), tuple(algorithms)), machine
        # The search is created after the warm-up updates, when the model's peak memory is known.
        self._tuner: StrategySearch | None = None
        self._free: float | None = None  # This rank's free bytes at the last memory peak.
        # The last update's bucket and strategy (None if not tuned), and its milliseconds on this rank.
        self._last: tuple[str, Strategy] | None = None
        self._milliseconds, self._is_timed = math.nan, False
        self._tokens = 0  # The number of tokens in this rank's micro-batches of the update.
        self._warm = 0

    @property
    def tuner(self) -> StrategySearch:
        """The search over strategies. The first access creates the search and is collective."""
        if self._tuner is None:
            self._tuner = StrategySearch(self._degrees(), *self._pairs, self.static)
            on_gpu = self._device().type == "cuda"
            machine = self._machine or typical(torch.cuda.get_device_name() if on_gpu else None)
            self._machine = world.broadcast_object(machine, "the agreement on a hardware profile")
        return self._tuner

    def begin(self, num_tokens: int) -> Strategy:
        """Choose an update's strategy from the largest number of tokens in any rank's first micro-batch.

        The call is collective. If every rank called `end`, the cost of the previous update is recorded.
        """
        tokens, milliseconds, of_update = self._agreed(num_tokens)
        if math.isfinite(milliseconds):
            self._warm += 1
            if self._last is not None:
                self._record(milliseconds, of_update)
        strategy, self._last = self.static, None
        if self._warm >= WARM_UPDATES:
            key = self.key(tokens)
            is_new = key not in self.tuner.costs
            strategy = self.tuner.choose(key, partial(self._predicted, math.ceil(tokens)))
            if is_new and world.is_first():
                logger.info("adaptive: %s: measuring %d strategies", key, len(self.tuner.candidates[key]))
            self._last = key, strategy
        for layer in self.layers:
            layer.follow(strategy)
        self._tokens, self._milliseconds = num_tokens, math.nan
        self._is_timed = self._last is None or not self.tuner.settled(self._last[0])
        self._wait_for_gpu()
        self._started = time.perf_counter()
        return strategy

    def add_micro_batch(self, num_tokens: int) -> None:
        """Count the tokens of a later micro-batch of the update, because costs are times per token."""
        self._tokens += num_tokens

    def end(self) -> None:
        """Measure the time since `begin`. After several calls, the time of the last call counts."""
        if self._tuner is None:
            self._free = _free_bytes(self._device())
        if self._is_timed:
            self._wait_for_gpu()
            self._milliseconds = 1000 * (time.perf_counter() - self._started)

    def key(self, tokens: float) -> str:
        """Return the name of the bucket (range of expert capacities) to which a training update belongs.

        `tokens` is the largest number of tokens of any rank in the micro-batch. Without a capacity limit,
        an even share of the assignments counts as an expert's capacity.
        """
        slots = max(
            layer.config.top_k
            * math.ceil(abs(layer.config.capacity_factor or 1.0) * tokens / layer.config.num_experts)
            for layer in self.layers
        )
        low, above = 0, self.window
        while slots >= above:
            low, above = above, above + max(self.window, int(WIDENING * above))
        return f"{low} to {above - 1} slots"

    def _predicted(self, tokens: int, strategy: Strategy) -> float:
        """Return the predicted seconds of forward and backward of all MoE layers with a strategy."""
        assert self._machine is not None
        algorithm, seconds = "linear" if strategy.plan else strategy.algorithm, 0.0
        for layer in self.layers:
            config, topology = layer.config, layer.topology
            size, slices = topology.expert_parallel_size, layer.experts.part.slices
            degree = nearest_degree(strategy.adaptive_r, slices, config.hidden_layer_norm)
            nodes, local = (topology.grid.nodes, topology.grid.local) if topology.grid else (1, size)
            work = Work(
                tokens=tokens, model_dim=config.model_dim, hidden_dim=config.hidden_dim,
                experts=config.num_experts, top_k=config.top_k, glu=config.expert_type == "glu",
                bytes_per_element=_weights(layer)[0].element_size(),
            )  # fmt: skip
            cluster = Cluster(nodes=nodes, local=local, expert_parallel_size=size)
            way = replace(strategy, adaptive_r=degree, algorithm=algorithm)
            seconds += step_seconds(work, self._machine, cluster, way)
        return seconds

    def _record(self, milliseconds: float, tokens: float) -> None:
        assert self._last is not None
        key, strategy = self._last
        if self.tuner.settled(key):
            return
        # The cost is time per token, because updates in one bucket have different numbers of tokens.
        self.tuner.record(key, strategy, 1000 * milliseconds / max(tokens, 1))
        if self.tuner.settled(key) and world.is_first():
            best = self.tuner.best[key]
            cost = median(self.tuner.costs[key][best])
            logger.info("adaptive: %s: %s, %.4g ms per thousand tokens of a rank", key, best, cost)

    def _agreed(self, num_tokens: int) -> tuple[float, ...]:
        """Return three measurements, each as the maximum over all ranks. Collective.

        The measurements are the number of tokens of this micro-batch, the last update's milliseconds
        (infinite if a rank did not measure the time), and the last update's number of tokens.
        """
        milliseconds = self._milliseconds if math.isfinite(self._milliseconds) else math.inf
        own = [num_tokens, milliseconds, self._tokens]
        numbers = torch.tensor(own, dtype=torch.float64, device=self._device())
        all_reduce(numbers, "the tuner's agreement on an update", op=dist.ReduceOp.MAX)
        return tuple(numbers.tolist())

    def _degrees(self) -> tuple[int, ...]:
        """Return the values of adaptive_r that the layers allow and for which memory suffices.

        Gathered weights and their gradients may take more memory than with the configured adaptive_r. This
        increase is at most half of the free memory of the rank with the least free memory.
        """
        every: set[int] = set()
        for layer in self.layers:
            every.update(allowed_degrees(layer.experts.part.slices, layer.config.hidden_layer_norm))
        free = _free_bytes(self._device()) if self._free is None else self._free
        limit = torch.tensor(free / 2, device=self._device())
        all_reduce(limit, "the tuner's agreement on memory", op=dist.ReduceOp.MIN)
        given = self.static.adaptive_r
        most = self._gathered_bytes(given) + float(limit)
        return tuple(r for r in sorted(every) if r == given or self._gathered_bytes(r) <= most)

    def _gathered_bytes(self, degree: int) -> int:
        """Return the bytes that gathered weights and their gradients take if adaptive_r is `degree`."""
        total = 0
        for layer in self.layers:
            own = sum(p.numel() * p.element_size() for p in _weights(layer))
            ranks = layer.topology.expert_parallel_size
            total += 2 * own * (ranks if degree == 0 else max(1, layer.experts.part.slices // degree))
        return total

    def _device(self) -> torch.device:
        return _weights(self.layers[0])[0].device

    def _wait_for_gpu(self) -> None:
        if self._device().type == "cuda" and self._is_timed:
            torch.cuda.synchronize(self._device())


def _weights(layer: MoELayer) -> list[torch.Tensor]:
    return list(layer.experts.expert_parameters().values())


def _free_bytes(device: torch.device) -> float:
    """Return the free bytes at this rank's memory peak, on its GPU or in its part of the host memory."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return float(free - torch.cuda.max_memory_allocated(device))
    # A process keeps freed memory. The memory that is available now was therefore also free at the peak.
    left = host_memory.available()
    return math.inf if left is None else left / (ranks_per_node() or world.size())
