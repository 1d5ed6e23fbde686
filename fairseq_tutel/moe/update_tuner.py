"""Chooses the strategy of each training update, as Tutel does (Hwang et al. 2023, section 3.3)."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fairseq_tutel.files import json_of, renamed_when_whole
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

WIDENING = 0.25  # least width of a bucket relative to its lower end, for long-tailed dropless loads
WARM_UPDATES = 2  # the first allocates optimizer state; the second's memory peak is measured
FORMAT = 3
WINDOW = 128  # least width of a bucket, in slots of an expert
# The measurements depend on these options.
SIGNED = ("model_dim", "hidden_dim", "top_k", "exchange", "a2a_dtype")


class UpdateTuner:
    """Chooses an execution strategy for the MoE layers of a model in every training update.

    On every rank, call `begin` before the first micro-batch of an update, `add_micro_batch` before each
    further micro-batch, and `end` after the last backward. `begin` needs one small all-reduce over all
    ranks and one host synchronization. The first updates use the given strategy, because the free memory is
    measured first.

    Args:
        layers: all MoE layers of one model, on ranks that exchange tokens.
        window: least width of a capacity bucket (R in the paper), in slots of an expert.
        path: file that stores the measurements. It is read at the first search, and written after each
            measurement.
        overlaps: the numbers of chunks to choose from.
        algorithms: the all-to-all algorithms to choose from. None: all algorithms that the ranks allow.
        conditions: further conditions of the measurements by name, such as the precision.
        machine: hardware profile for predictions, which limit the candidates. None: a typical profile.

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
        path: str | None = None,
        overlaps: Sequence[int] = OVERLAPS,
        algorithms: Sequence[str] | None = None,
        conditions: Mapping[str, Any] | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.layers, self.window, self.path = list(layers), window, path
        first = self.layers[0]
        require(
            first.topology.expert_parallel_size > 1,
            "UpdateTuner has nothing to choose: every rank has all experts; give layers whose topology has "
            "an expert_parallel_size above 1.",
        )
        if algorithms is None:
            algorithms = ALGORITHMS if first.topology.grid is not None else ALGORITHMS[:1]
        self.static, self.conditions = first.strategy, dict(conditions or {})
        self._pairs, self._machine = (tuple(overlaps), tuple(algorithms)), machine
        # The search is created after the warm-up updates. By then the model is on its device and its peak
        # memory is known.
        self._tuner: StrategySearch | None = None
        self._free: float | None = None  # free bytes on this rank at the peak of the last update
        # The key and strategy of the last update, if the tuner chose its strategy, and its milliseconds on
        # this rank.
        self._last: tuple[str, Strategy] | None = None
        self._milliseconds, self._is_timed = math.nan, False
        self._micro_batches = [0]  # number of tokens of each micro-batch on this rank
        self._warm = 0
        for layer in self.layers:
            if layer.config.capacity_factor <= 0:
                layer.watch_load()

    @property
    def tuner(self) -> StrategySearch:
        """The search over strategies, created at the first access. The first access is collective."""
        if self._tuner is None:
            self._tuner = StrategySearch(self._degrees(), *self._pairs, self.static)
            on_gpu = self._device().type == "cuda"
            machine = self._machine or typical(torch.cuda.get_device_name() if on_gpu else None)
            self._machine = world.broadcast_object(machine, "the agreement on a hardware profile")
            self._load()
        return self._tuner

    def begin(self, num_tokens: int) -> Strategy:
        """Choose the strategy of an update, from the largest first micro-batch of any rank.

        Collective over all ranks. The previous update is recorded only if every rank called `end` for it.
        """
        tokens, milliseconds, busiest, of_update, of_last = self._agreed(num_tokens)
        if math.isfinite(milliseconds):
            self._warm += 1
            if self._last is not None:
                self._record(milliseconds, of_update)
        strategy, self._last = self.static, None
        if self._warm >= WARM_UPDATES:
            key = self.key(tokens, busiest / of_last * tokens if of_last else 0.0)
            strategy = self.tuner.choose(key, partial(self._predicted, math.ceil(tokens)))
            self._last = key, strategy
        for layer in self.layers:
            layer.follow(strategy)
        self._micro_batches, self._milliseconds = [num_tokens], math.nan
        self._is_timed = self._last is None or not self.tuner.settled(self._last[0])
        self._wait_for_gpu()
        self._started = time.perf_counter()
        return strategy

    def add_micro_batch(self, num_tokens: int) -> None:
        """Add the tokens of a further micro-batch to the update, whose cost is its time per token."""
        self._micro_batches.append(num_tokens)

    def end(self) -> None:
        """Record the time at which the update ends. If called several times, the last call counts."""
        if self._tuner is None:
            self._free = _free_bytes(self._device())
        if self._is_timed:
            self._wait_for_gpu()
            self._milliseconds = 1000 * (time.perf_counter() - self._started)

    def key(self, tokens: float, busiest: float) -> str:
        """Return the name of the range of expert capacities (bucket) that an update belongs to.

        `tokens` is the largest number of tokens of any rank in the micro-batch. `busiest` is the expected
        number of assignments of the busiest expert; 0 means unknown.
        """
        slots = max(_capacity(layer, tokens, busiest) for layer in self.layers)
        low, above = 0, self.window
        while slots >= above:
            low, above = above, above + max(self.window, int(WIDENING * above))
        factor = self.layers[0].config.capacity_factor
        return f"capacity factor {factor:g}, {low} to {above - 1} slots"

    def _predicted(self, tokens: int, strategy: Strategy) -> float:
        """Return the predicted seconds of all layers' forward and backward with a strategy."""
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
        # The cost is per token, since updates in one bucket have different numbers of tokens.
        self.tuner.record(key, strategy, 1000 * milliseconds / max(tokens, 1))
        if self.tuner.settled(key) and world.is_first():
            best = self.tuner.best[key]
            costs = {strategy: median(c) for strategy, c in self.tuner.costs[key].items()}
            logger.info(
                "adaptive: %s: adaptive_r %d, overlap %d, %s: %.4g ms per thousand tokens of a rank; given "
                "strategy %.4g ms; slowest of %d strategies %.4g ms",
                key, best.adaptive_r, best.overlap, best.algorithm, costs[best],
                costs.get(self.static, math.nan), len(costs), max(costs.values()),
            )  # fmt: skip
        self._save()  # an interrupted run can continue from this state

    def _agreed(self, num_tokens: int) -> tuple[float, ...]:
        """Return five measured values of an update, each the maximum over all ranks. Collective.

        The first value is the number of tokens of this micro-batch. The other values describe the last
        update: its milliseconds (infinite if a rank did not measure them), the assignments of the busiest
        expert, all tokens, and the tokens of the last micro-batch.
        """
        milliseconds = self._milliseconds if math.isfinite(self._milliseconds) else math.inf
        own = [num_tokens, milliseconds, 0.0, sum(self._micro_batches), self._micro_batches[-1]]
        numbers = torch.tensor(own, dtype=torch.float64, device=self._device())
        loads = [layer.busiest for layer in self.layers if layer.busiest is not None]
        if loads:
            numbers[2] = torch.stack(loads).max()
        all_reduce(numbers, "the tuner's agreement on an update", op=dist.ReduceOp.MAX)
        return tuple(numbers.tolist())

    def _degrees(self) -> tuple[int, ...]:
        """Return the values of adaptive_r that the layers allow and that do not need too much memory.

        Compared with the given r, gathered weights and their gradients may take at most half of the free
        memory of the rank with the least free memory.
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

    def signature(self) -> dict[str, Any]:
        """Return the conditions of the measurements. Measurements from other conditions are not used."""
        place, config = self.layers[0].topology, self.layers[0].config
        on_gpu = self._device().type == "cuda"
        return {
            "ranks": place.world_size,
            "expert_parallel_size": place.expert_parallel_size,
            "ranks_per_node": place.grid.local if place.grid else 0,
            "experts": [layer.config.num_experts for layer in self.layers],
            **{name: getattr(config, name) for name in SIGNED},
            "expert_type": str(config.expert_type),
            "window": self.window,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
            "dtype": str(_weights(self.layers[0])[0].dtype),
            **self.conditions,
        }

    def _load(self) -> None:
        """Read the saved measurements on rank 0 and broadcast them to all ranks."""
        if self.path is None:
            return
        found = _read(self.path, self.signature()) if world.is_first() else {}
        found = world.broadcast_object(found, "the reading of the tuner's dictionary")
        self.tuner.load(found)
        if world.is_first() and found:
            counts = self.path, len(self.tuner.best), len(self.tuner.costs)
            logger.info("adaptive: loaded %s: %d of %d buckets settled", *counts)

    def _save(self) -> None:
        """Write the measurements on rank 0. A failure logs a warning, and training continues."""
        if self.path is None or not world.is_first():
            return
        content = {"format": FORMAT, "signature": self.signature(), "buckets": self.tuner.state()}
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with renamed_when_whole(self.path) as temporary, open(temporary, "w") as file:
                json.dump(content, file, indent=1)
        except OSError as error:
            logger.warning("adaptive: %s was not written: %s", self.path, error)
            self.path = None


def _weights(layer: MoELayer) -> list[torch.Tensor]:
    return list(layer.experts.expert_parameters().values())


def _free_bytes(device: torch.device) -> float:
    """Return the free bytes at this rank's memory peak, on its GPU or in its share of host memory."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return float(free - torch.cuda.max_memory_allocated(device))
    # A process keeps memory that it freed, so this is the free memory at the peak.
    left = host_memory.available()
    return math.inf if left is None else left / (ranks_per_node() or world.size())


def _capacity(layer: MoELayer, tokens: float, busiest: float) -> float:
    """Return the number of slots that an expert needs, as the capacity factor and the loads require."""
    config = layer.config
    factor = config.capacity_factor
    limit = config.top_k * math.ceil(abs(factor) * tokens / config.num_experts)
    if factor > 0:
        return limit
    need = busiest or config.top_k * tokens / config.num_experts
    return min(need, limit) if factor < 0 else need


def _read(path: str, signature: dict[str, Any]) -> dict[str, Any]:
    """Read saved measurements. Return {} if the file is missing, corrupt or made in other conditions."""
    try:
        content = json_of(path)
        is_same = content["format"] == FORMAT and content["signature"] == signature
        buckets = content["buckets"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("adaptive: %s cannot be read (%s); measuring again", path, error)
        return {}
    if not is_same:
        logger.info("adaptive: %s was measured with another setup; measuring again", path)
    return buckets if is_same else {}
