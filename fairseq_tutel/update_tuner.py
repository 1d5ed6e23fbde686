"""The tuner at work in a training: each update's capacity bucket, its time, and one choice for all ranks.

T tokens, E experts, K top_k, C capacity. Source of the key: Tutel (Hwang et al. 2023), section 3.3.
"""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fairseq_tutel.comm.adaptive import allowed_degrees
from fairseq_tutel.comm.guard import guarded
from fairseq_tutel.comm.how import ALGORITHMS, How
from fairseq_tutel.comm.tuner import Tuner
from fairseq_tutel.moe_layer import MoELayer

logger = logging.getLogger(__name__)

WINDOW = 128  # places of an expert in one bucket (the paper's R)
OVERLAPS = (1, 2, 4, 8)
FORMAT = 1


class UpdateTuner:
    """Chooses how the MoE layers of a model run, update by update.

    Call `begin` before the first micro-batch of an update and `end` after its optimizer step, on every
    rank. `begin` holds one small all-reduce over all ranks and one host read.

    Args:
        layers: of one model, on ranks that exchange tokens.
        window: width of a capacity bucket, in places of an expert.
        path: of the dictionary of what was found, read now and written whenever a bucket is settled.
    """

    def __init__(
        self, layers: Sequence[MoELayer], window: int = WINDOW, path: str | None = None
    ) -> None:
        self.layers, self.window, self.path = list(layers), window, path
        config, self.static = layers[0].config, layers[0].how
        self.tuner = Tuner(degrees_of(layers), *_pairs_of(layers[0]))
        self.running = False
        self._device = _device_of(layers[0])
        # Of the last update: its key and How, milliseconds on this rank, tokens on the busiest.
        self._last: tuple[str, How] | None = None
        self._milliseconds, self._tokens, self._busiest = math.nan, 0.0, 0.0
        for layer in layers:
            layer.watches_load = config.capacity_factor <= 0
        if path is not None:
            self._load(path)

    def begin(self, num_tokens: int) -> How:
        """Choose how this update runs, by the tokens of its first micro-batch on the busiest rank.

        Collective over all ranks.
        """
        mine = [float(num_tokens), self._milliseconds, self._load_here()]
        facts = torch.tensor(mine, dtype=torch.float64, device=self._device)
        facts[1] = facts[1].nan_to_num(
            math.inf
        )  # a rank that measured nothing voids the measurement
        if dist.is_initialized():
            with guarded("the tuner's agreement on an update"):
                dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        tokens, milliseconds, busiest = facts.tolist()
        if self._last is not None:
            self._record(milliseconds)
        self._busiest = busiest / self._tokens * tokens if self._tokens else 0.0
        self._tokens = tokens
        key = self.key(tokens, self._busiest)
        how = self.tuner.choose(key)
        for layer in self.layers:
            layer.how = how
        self._last, self.running = (key, how), True
        self._wait_for_gpu()
        self._started = time.perf_counter()
        return how

    def end(self) -> None:
        """Stop the clock."""
        self._wait_for_gpu()
        self._milliseconds = 1000 * (time.perf_counter() - self._started)
        self.running = False

    def key(self, tokens: float, busiest: float) -> str:
        """Return the bucket of an update.

        Args:
            tokens: of a micro-batch on the busiest rank.
            busiest: what an expert of such a micro-batch is expected to get, at most; 0: not known.
        """
        places = max(_capacity(layer, tokens, busiest) for layer in self.layers)
        low = int(places) // self.window * self.window
        factor = self.layers[0].config.capacity_factor
        return f"capacity factor {factor:g}, {low} to {low + self.window - 1} places"

    def _record(self, milliseconds: float) -> None:
        assert self._last is not None
        key, how = self._last
        known = self.tuner.settled(key)
        # Per token, since updates of one bucket differ in those a little.
        self.tuner.record(key, how, 1000 * milliseconds / max(self._tokens, 1))
        if self.tuner.settled(key) and not known:
            self._say(key)
            self._save()

    def _say(self, key: str) -> None:
        costs = {how: sorted(c)[len(c) // 2] for how, c in self.tuner.costs[key].items()}
        best = self.tuner.best[key]
        gain = ""
        plain = dataclasses.replace(self.static, adaptive_r=best.adaptive_r)
        for other, name in ((self.static, "as given"), (plain, "as given but for adaptive_r")):
            if other in costs:
                gain = f", {costs[other] / costs[best]:.3g} times as fast as {name}"
                break
        if _is_first_rank():
            logger.info(
                "adaptive: %s: adaptive_r %d, overlap %d, %s: %.4g ms per thousand tokens%s, slowest "
                "%.4g ms; %d ways measured",
                key, best.adaptive_r, best.overlap, best.algorithm, costs[best], gain, max(costs.values()),
                len(costs),
            )  # fmt: skip

    def _load_here(self) -> float:
        """Return the most that an expert got in a micro-batch, over the layers; 0 where not watched."""
        needs = [layer.busiest for layer in self.layers if layer.busiest is not None]
        return float(torch.stack(needs).max()) if needs else 0.0

    def _wait_for_gpu(self) -> None:
        exploring = self._last is not None and not self.tuner.settled(self._last[0])
        if self._device.type == "cuda" and exploring:
            torch.cuda.synchronize(self._device)

    def signature(self) -> dict[str, Any]:
        """Return what measurements hold for: a dictionary of another signature is not used."""
        place, config = self.layers[0].topology, self.layers[0].config
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
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu",
        }

    def _load(self, path: str) -> None:
        """Read the dictionary on rank 0 and give it to all."""
        found: list[Any] = [None]
        if _is_first_rank():
            found = [_read(path, self.signature())]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        if found[0] is not None:
            self.tuner.load(found[0])
            if _is_first_rank():
                logger.info("adaptive: %d buckets from %s", len(self.tuner.best), path)

    def _save(self) -> None:
        """Write the dictionary on rank 0; a full disk costs the dictionary and not the training."""
        if self.path is None or not _is_first_rank():
            return
        content = {"format": FORMAT, "signature": self.signature(), "buckets": self.tuner.state()}
        temporary = self.path + ".tmp"
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with open(temporary, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("adaptive: %s was not written: %s", self.path, error)


def degrees_of(layers: Sequence[MoELayer]) -> tuple[int, ...]:
    """Return every r that a layer may run with and that the tuner may try.

    Where r is not to be tuned, the one that is given. Degrees whose gathered experts, with their
    gradients, take more than half of a GPU's free memory are left out.
    """
    config = layers[0].config
    if "auto" not in (config.adaptive, config.parallel_type):
        return (layers[0].how.adaptive_r,)
    every = {
        r
        for layer in layers
        for r in allowed_degrees(layer.experts.slices, layer.config.hidden_layer_norm)
    }
    limit = torch.tensor(math.inf)
    device = _device_of(layers[0])
    if device.type == "cuda":
        limit = torch.tensor(torch.cuda.mem_get_info(device)[0] / 2, device=device)
        if dist.is_initialized():
            dist.all_reduce(limit, op=dist.ReduceOp.MIN)
    return tuple(r for r in sorted(every) if r == 1 or _gathered_bytes(layers, r) <= float(limit))


def _gathered_bytes(layers: Sequence[MoELayer], degree: int) -> int:
    """Return what a forward and backward hold of gathered experts under r: weights and gradients."""
    total = 0
    for layer in layers:
        own = sum(p.numel() * p.element_size() for p in layer.experts.expert_parameters().values())
        ranks = layer.topology.expert_parallel_size
        total += 2 * own * (ranks if degree == 0 else max(1, layer.experts.slices // degree))
    return total


def _pairs_of(layer: MoELayer) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the overlaps and the algorithms to choose from."""
    if layer.config.adaptive != "auto":
        return (layer.how.overlap,), (layer.how.algorithm,)
    return OVERLAPS, ALGORITHMS if layer.topology.grid is not None else ALGORITHMS[:1]


def _device_of(layer: MoELayer) -> torch.device:
    return next(iter(layer.experts.expert_parameters().values())).device


def _capacity(layer: MoELayer, tokens: float, busiest: float) -> float:
    """Return the places an expert needs, by the sign rule of the capacity factor."""
    config = layer.config
    factor = config.capacity_factor
    limit = config.top_k * math.ceil(abs(factor) * tokens / config.num_experts)
    if factor > 0:
        return limit
    need = busiest or config.top_k * tokens / config.num_experts
    return min(need, limit) if factor < 0 else need


def _read(path: str, signature: dict[str, Any]) -> dict[str, Any] | None:
    try:
        with open(path) as file:
            content = json.load(file)
        if content["format"] == FORMAT and content["signature"] == signature:
            return content["buckets"]
        logger.info("adaptive: %s is of another model or cluster, and is measured anew", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("adaptive: %s cannot be read (%s), and is measured anew", path, error)
    return None


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
