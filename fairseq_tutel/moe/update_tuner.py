"""The tuner at work in a training: each update's capacity bucket, its time, and one choice for all ranks.

T tokens, E experts, K top_k, C capacity. Source of the key: Tutel (Hwang et al. 2023), section 3.3.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fairseq_tutel.comm.collectives import all_reduce
from fairseq_tutel.files.small import json_of
from fairseq_tutel.moe.adaptive import allowed_degrees
from fairseq_tutel.moe.config import TaskConfig
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.planning.cost import OVERLAPS
from fairseq_tutel.planning.strategy import ALGORITHMS, Strategy
from fairseq_tutel.planning.tuner import Tuner
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.rendezvous import ranks_per_node

logger = logging.getLogger(__name__)

WIDENING = 0.25  # of where a bucket begins, where that is wider: dropless loads have a long tail
WARM_UPDATES = (
    2  # the first makes the optimizer's state, the second's peak says what memory is free
)
WATCH_EVERY = 10  # updates of a settled bucket to one that is timed
SAVE_EVERY = 10  # measurements
FORMAT = 3


class UpdateTuner:
    """Chooses how the MoE layers of a model run, update by update.

    Call `begin` before the first micro-batch of an update, `add_micro_batch` before each further one, and
    `end` after the last backward, on every rank. `begin` holds one small all-reduce over all ranks and one
    host read. The first updates run as given: what memory is left is known after them.

    Args:
        layers: of one model, on ranks that exchange tokens.
        window: width of a capacity bucket (the paper's R), in places of an expert; large ones are a
            quarter of where they begin.
        path: of the dictionary of what was found; read at the first `begin`, written whenever a bucket is
            settled. None keeps none.
        overlaps: numbers of chunks to choose from.
        algorithms: to choose from; None for all that the layers' ranks allow.
        conditions: what else measurements depend on, such as the precision, by name.

    Raises:
        ValueError: there is nothing to choose from, since every rank has all experts.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        window: int = TaskConfig.moe_adaptive_window,
        path: str | None = None,
        overlaps: Sequence[int] = OVERLAPS,
        algorithms: Sequence[str] | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers, self.window, self.path = _checked(layers), window, path
        first = self.layers[0]
        if first.topology.expert_parallel_size == 1:
            raise ValueError(
                "UpdateTuner has nothing to choose: every rank has all experts; give layers whose topology "
                "has an expert_parallel_size above 1."
            )
        if algorithms is None:
            algorithms = ALGORITHMS if first.topology.grid is not None else ALGORITHMS[:1]
        self.static, self.conditions = first.strategy, dict(conditions or {})
        self._pairs = tuple(overlaps), tuple(algorithms)
        # Made when the model is where it is trained, and all of its memory was taken once.
        self._tuner: Tuner | None = None
        self._room: float | None = None  # bytes that this rank had left in the last update
        # Of the last update: its key and strategy, if it was chosen; milliseconds on this rank.
        self._last: tuple[str, Strategy] | None = None
        self._milliseconds, self._is_timed = math.nan, False
        self._micro_batches = [0]  # tokens of each on this rank
        self._updates, self._warm, self._recorded, self._said_unwritten = 0, 0, 0, False
        for layer in self.layers:
            if layer.config.capacity_factor <= 0:
                layer.watch_load()

    @property
    def tuner(self) -> Tuner:
        """The search; collective where it is made."""
        if self._tuner is None:
            self._tuner = Tuner(self._degrees(), *self._pairs)
            self._load()
        return self._tuner

    def begin(self, num_tokens: int) -> Strategy:
        """Choose how this update runs, by the tokens of its first micro-batch on the busiest rank.

        Collective over all ranks. Where the last update did not `end` on every rank, its time does not
        count.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; give the tokens of a micro-batch.")
        tokens, milliseconds, busiest, of_update, of_last = self._agreed(num_tokens)
        if math.isfinite(milliseconds):
            self._warm += 1
            if self._last is not None:
                self._record(milliseconds, of_update)
        strategy, self._last = self.static, None
        if self._warm >= WARM_UPDATES:
            key = self.key(tokens, busiest / of_last * tokens if of_last else 0.0)
            strategy = self.tuner.choose(key, self._best_beside(key))
            self._last = key, strategy
        for layer in self.layers:
            layer.follow(strategy)
        self._micro_batches, self._milliseconds = [num_tokens], math.nan
        self._updates += 1
        settled = self._last is not None and self.tuner.settled(self._last[0])
        self._is_timed = not settled or self._updates % WATCH_EVERY == 0
        self._wait_for_gpu()
        self._started = time.perf_counter()
        return strategy

    def add_micro_batch(self, num_tokens: int) -> None:
        """Count a further micro-batch of an update, whose time is taken for each of all its tokens."""
        self._micro_batches.append(num_tokens)

    def end(self) -> None:
        """Stop the clock; of several calls in an update the last counts.

        Raises:
            RuntimeError: no update was begun.
        """
        if not self._updates:
            raise RuntimeError("UpdateTuner.end was called before begin; call begin first.")
        if self._tuner is None:
            self._room = _free_bytes(self._device())
        if self._is_timed:
            self._wait_for_gpu()
            self._milliseconds = 1000 * (time.perf_counter() - self._started)

    def key(self, tokens: float, busiest: float) -> str:
        """Return the bucket of an update.

        Args:
            tokens: of a micro-batch on the busiest rank.
            busiest: what an expert of such a micro-batch is expected to get, at most; 0: not known.
        """
        places = max(_capacity(layer, tokens, busiest) for layer in self.layers)
        low, above = 0, self.window
        while places >= above:
            low, above = above, above + max(self.window, int(WIDENING * above))
        return f"{self._rule}{low} to {above - 1} places"

    @property
    def _rule(self) -> str:
        """What the keys of this capacity factor begin with."""
        return f"capacity factor {self.layers[0].config.capacity_factor:g}, "

    def _best_beside(self, key: str) -> Strategy | None:
        """Return what is best in the settled bucket that is nearest to one, if there is any."""

        def low(key: str) -> int:
            return int(key.removeprefix(self._rule).partition(" ")[0])

        alike = [known for known in self.tuner.best if known.startswith(self._rule)]
        nearest = min(alike, key=lambda known: abs(low(known) - low(key)), default=None)
        return None if nearest is None else self.tuner.best[nearest]

    def _record(self, milliseconds: float, tokens: float) -> None:
        assert self._last is not None
        key, strategy = self._last
        known = self.tuner.settled(key)
        # Per token, since updates of one bucket differ in those.
        self.tuner.record(key, strategy, 1000 * milliseconds / max(tokens, 1))
        self._recorded += not known
        if known and not self.tuner.settled(key) and world.is_first():
            logger.info(
                "adaptive: %s: updates take longer or shorter than they did: measured anew", key
            )
        if self.tuner.settled(key) and not known:
            self._say(key)
            self._save()
        elif not known and self._recorded % SAVE_EVERY == 0:
            self._save()  # a job that is ended early goes on from here

    def _say(self, key: str) -> None:
        if not world.is_first():
            return
        costs = {strategy: median(c) for strategy, c in self.tuner.costs[key].items()}
        best = self.tuner.best[key]
        gain = ""
        if self.static in costs:
            gain = f", {costs[self.static] / costs[best]:.3g} times as fast as the way given"
        logger.info(
            "adaptive: %s: adaptive_r %d, overlap %d, %s: %.4g ms per thousand tokens of a rank%s; the "
            "slowest of %d ways took %.4g ms",
            key, best.adaptive_r, best.overlap, best.algorithm, costs[best], gain, len(costs),
            max(costs.values()),
        )  # fmt: skip

    def _agreed(self, num_tokens: int) -> tuple[float, ...]:
        """Return the most of all ranks of five numbers.

        The tokens of this micro-batch; then of the last update: milliseconds, what an expert got in its
        last micro-batch, the tokens of all its micro-batches, and of the last one.
        """
        device = self._device()
        # A rank that measured nothing voids the measurement.
        took = self._milliseconds if math.isfinite(self._milliseconds) else math.inf
        told = [num_tokens, took, 0.0, sum(self._micro_batches), self._micro_batches[-1]]
        mine = torch.tensor(told, dtype=torch.float64, device=device)
        needs = [layer.busiest for layer in self.layers if layer.busiest is not None]
        if needs:
            mine[2] = torch.stack(needs).max()
        all_reduce(mine, "the tuner's agreement on an update", op=dist.ReduceOp.MAX)
        return tuple(mine.tolist())

    def _degrees(self) -> tuple[int, ...]:
        """Return every r that a layer may run with, but for those that take too much memory.

        Gathered experts and their gradients may take half of what is free, on the rank that has least,
        beside those of the r that was given, which may take what it takes.
        """
        every = {
            r
            for layer in self.layers
            for r in allowed_degrees(layer.experts.part.slices, layer.config.hidden_layer_norm)
        }
        room = _free_bytes(self._device()) if self._room is None else self._room
        limit = torch.tensor(room / 2, device=self._device())
        all_reduce(limit, "the tuner's agreement on memory", op=dist.ReduceOp.MIN)
        given = self.static.adaptive_r
        most = self._gathered_bytes(given) + float(limit)
        return tuple(r for r in sorted(every) if r == given or self._gathered_bytes(r) <= most)

    def _gathered_bytes(self, degree: int) -> int:
        """Return what a forward and backward hold of gathered experts under r: weights and gradients."""
        total = 0
        for layer in self.layers:
            parameters = layer.experts.expert_parameters().values()
            own = sum(p.numel() * p.element_size() for p in parameters)
            ranks = layer.topology.expert_parallel_size
            total += (
                2 * own * (ranks if degree == 0 else max(1, layer.experts.part.slices // degree))
            )
        return total

    def _device(self) -> torch.device:
        return next(iter(self.layers[0].experts.expert_parameters().values())).device

    def _wait_for_gpu(self) -> None:
        if self._device().type == "cuda" and self._is_timed:
            torch.cuda.synchronize(self._device())

    def signature(self) -> dict[str, Any]:
        """Return what measurements hold for: a dictionary of another signature is not used."""
        place, config = self.layers[0].topology, self.layers[0].config
        on_gpu = self._device().type == "cuda"
        return {
            "ranks": place.world_size,
            "expert_parallel_size": place.expert_parallel_size,
            "ranks_per_node": place.grid.local if place.grid else 0,
            "experts": [layer.config.num_experts for layer in self.layers],
            "model_dim": config.model_dim,
            "hidden_dim": config.hidden_dim,
            "expert_type": config.expert_type,
            "top_k": config.top_k,
            "exchange": config.exchange,
            "a2a_dtype": config.a2a_dtype,
            "window": self.window,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
            "dtype": str(next(iter(self.layers[0].experts.expert_parameters().values())).dtype),
            **self.conditions,
        }

    def _load(self) -> None:
        """Read the dictionary on rank 0 and give it to all."""
        if self.path is None:
            return
        found = None
        if world.is_first():
            _warn_if_unwritable(self.path)
            found = _read(self.path, self.signature())
        found = world.told_by_first(found, "the reading of the tuner's dictionary")
        if found is None:
            return
        try:
            refused = self.tuner.load(found)
        except ValueError as error:
            _say_unreadable(self.path, error)
            self._tuner = Tuner(self.tuner.rs, *self._pairs)
            return
        if world.is_first():
            logger.info(
                "adaptive: from %s: %d buckets settled, %d to be gone on with, %d whose best cannot be "
                "chosen here",
                self.path,
                len(self.tuner.best),
                len(self.tuner.costs) - len(self.tuner.best),
                refused,
            )

    def _save(self) -> None:
        """Write the dictionary on rank 0; a full disk costs the dictionary and not the training."""
        if self.path is None or not world.is_first():
            return
        content = {"format": FORMAT, "signature": self.signature(), "buckets": self.tuner.state()}
        temporary = self.path + ".tmp"
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with open(temporary, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            if not self._said_unwritten:
                self._said_unwritten = True
                logger.warning("adaptive: %s was not written: %s", self.path, error)


def _free_bytes(device: torch.device) -> float:
    """Return the memory that this rank had left when it took most: of its GPU, or its part of the host's.

    A process keeps memory that it freed: on a host the most is what it takes now.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return float(free - torch.cuda.max_memory_allocated(device))
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / (ranks_per_node() or world.size())


def _capacity(layer: MoELayer, tokens: float, busiest: float) -> float:
    """Return the places an expert needs, by the sign rule of the capacity factor."""
    config = layer.config
    factor = config.capacity_factor
    limit = config.top_k * math.ceil(abs(factor) * tokens / config.num_experts)
    if factor > 0:
        return limit
    need = busiest or config.top_k * tokens / config.num_experts
    return min(need, limit) if factor < 0 else need


def _checked(layers: Sequence[MoELayer]) -> list[MoELayer]:
    if not isinstance(layers, Sequence) or not layers:
        raise ValueError("UpdateTuner takes a list of at least one MoELayer, all of one model.")
    return list(layers)


def _read(path: str, signature: dict[str, Any]) -> dict[str, Any] | None:
    """Return the buckets of a dictionary, or None and a word where there are none for this model."""
    try:
        content = json_of(path)
        there = {"format": content["format"], **content["signature"]}
        buckets = content["buckets"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _say_unreadable(path, error)
        return None
    here = {"format": FORMAT, **signature}
    names = [name for name in here if there.get(name) != here[name]]
    if names:
        differing = ", ".join(f"{n} is {there.get(n)} there and {here[n]} here" for n in names)
        logger.info("adaptive: %s does not hold here and is measured anew: %s", path, differing)
        return None
    return buckets


def _say_unreadable(path: str, error: Exception) -> None:
    if world.is_first():
        logger.warning("adaptive: %s cannot be read (%s), and is measured anew", path, error)


def _warn_if_unwritable(path: str) -> None:
    """Say at once, and not after the search, that what is found will be lost."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        fine = os.access(folder, os.W_OK) and not os.path.isdir(path)
    except OSError:
        fine = False
    if not fine:
        logger.warning("adaptive: %s cannot be written; what is found will be lost", path)
