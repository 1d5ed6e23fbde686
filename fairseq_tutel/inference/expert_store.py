"""An expert store keeps experts on disk or in host memory and loads experts when a MoE layer needs them."""

import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.inference.expert_buffers import Buffer, BufferLayout
from fairseq_tutel.inference.expert_cache import ExpertCache, Key
from fairseq_tutel.inference.expert_sources import FromFiles, FromHost, ShardFiles, source_of
from fairseq_tutel.inference.fetch_thread import Fetch, Fetcher
from fairseq_tutel.inference.options import (
    AUTO,
    EVICTIONS,
    STORE_POLICIES,
    STORE_PRODUCTS,
    STORE_TIERS,
    cache_limits,
)
from fairseq_tutel.kernels import backend_for
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.weights import ExpertTensorList
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors, Weights
from fairseq_tutel.parallel import host_memory, world
from fairseq_tutel.parallel.rendezvous import ranks_per_node

logger = logging.getLogger(__name__)
CLOSED = "the expert store is closed; create another one and open the model again."


@dataclass
class Counters:
    """Statistics of an expert store: calls, fetches, cache hits, waits and peak memory."""

    calls: int = 0  # Number of calls of MoE layers.
    asked: int = 0  # Number of experts with rows, summed over calls.
    fetches: int = 0  # Number of experts that were read, including prefetches.
    hits: int = 0  # Number of experts with rows that were in memory from an earlier use.
    cancelled: int = 0  # Number of prefetches that were cancelled before they began.
    bytes: int = 0  # Number of bytes that were read.
    waits: int = 0  # Number of calls that waited for an expert.
    seconds_waited: float = 0.0
    peak_experts: int = 0  # Largest number of experts in memory, including the cache.
    peak_bytes: int = 0  # Largest number of bytes of experts in memory, in their stored format.

    def add(self, **amounts: float) -> None:
        """Add the given amounts to the counters of the expert store."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)


class ExpertStore:
    """Keeps the experts of MoE layers on disk or in host memory, and fetches experts that get rows.

    An expert store is for evaluation only. Outputs are bit-identical to those with experts in memory. There
    are two exceptions on a CPU: products with quantized experts are rounded (see below), and outputs can
    differ by rounding if the size of an expert's matrix is not a multiple of 64 bytes.

    A single thread reads experts until `close`, the end of the process, or an error. After an error, the
    store's next use raises ValueError. A deep copy of a model shares the model's store. A forked process or
    second thread needs a separate store. A model with experts in a store can be neither saved nor loaded.

    docs/inference.md has a table of the policies. With `pregated`, the model calls `prefetch`. With
    `prefetch-all`, the store prefetches the layer that followed the current layer the last time. At first,
    the store prefetches the layer that was added after the current layer.

    Tiers: The tier `disk` reads the shard files of a checkpoint, and `host` keeps experts in memory (pinned
    if there is a GPU). The cache size is in experts or, with a unit (`"2GiB"`), in bytes. The cache size
    `"auto"` is half of the memory that is free at the first fetch.

    On a CPU, built-in experts in int8 and int4 are multiplied without dequantization. The relative error of
    a product with int8 or int4 is at most 2**-8, which is less than the relative error of quantization.
    With `compute="unpacked"`, matrices are first converted to the model's dtype.

    Raises:
        ValueError: the policy, tier, cache size, eviction policy or `compute` is invalid.

    Example:
        >>> layer = ft.MoELayer(ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8)).eval()
        >>> with ft.ExpertStore("on-demand", tier="host", cache=4) as store, torch.no_grad():
        ...     store.add(layer.experts)  # for a sharded checkpoint: store.add(layer.experts, tensors)
        ...     y, output = layer(torch.randn(1, 64))  # one token with two experts
        ...     store.counters.fetches
        2
    """

    def __init__(
        self,
        policy: str = "on-demand",
        tier: str = "disk",
        cache: int | str = 0,
        eviction: str = "lfu",
        compute: str = "quantized",
    ) -> None:
        for argument, value, known in (
            ("policy", policy, STORE_POLICIES),
            ("tier", tier, STORE_TIERS),
            ("eviction", eviction, EVICTIONS),
            ("compute", compute, STORE_PRODUCTS),
        ):
            if value not in known:
                choices = ", ".join(known)
                raise ValueError(f"{argument} of an expert store is {value!r}; choose from {choices}.")
        self.policy, self.tier, self.compute = policy, tier, compute
        self.counters = Counters()
        self._sizes_cache = cache == AUTO
        self._cache = ExpertCache(eviction, *((0, None) if self._sizes_cache else cache_limits(cache)))
        self._stacks: list[tuple[ExpertStack, FromFiles | FromHost]] = []
        self._followers: dict[int, int] = {}  # Maps a layer to the layer that ran after it the last time.
        self._last = -1
        self._fetches: dict[Key, Fetch] = {}  # The fetch of each expert that has a buffer.
        self._used: set[Key] = set()  # Experts that the current call uses.
        self._prefetched: dict[int, set[Key]] = {}
        self._bytes = 0  # The total bytes of experts in memory.
        self._free_buffers: dict[tuple[BufferLayout, torch.device], list[Buffer]] = {}
        self._files, self._fetcher = ShardFiles(), Fetcher()
        self._close = weakref.finalize(self, self._fetcher.end, CLOSED)

    def add(self, stack: ExpertStack, tensors: Mapping[str, Any] | None = None) -> None:
        """Offload the experts of a layer to the store, and free the layer's expert parameters.

        `tensors` has the `ShardedTensor`s of a checkpoint by name or, for tier `host`, ordinary tensors
        (default: those of `stack`). The tensors contain all experts, or those of this rank.

        Raises:
            ValueError: the tensors do not fit the layer or the tier.
        """
        self._fetcher.refuse_ended()
        own = {name: getattr(stack, name) for name in stack.names}
        source = source_of(stack, own if tensors is None else tensors, self.tier, self._files)
        self._stacks.append((stack, source))
        stack.offload_to(_StoredWeights(self, len(self._stacks) - 1))

    @property
    def is_open(self) -> bool:
        """Whether the store is usable, that is, open, without an error, and created by this process."""
        return not self._fetcher.ended

    def close(self) -> None:
        """End the fetch thread; layers in the store can no longer be called."""
        self._close()
        self._stacks.clear()
        self._fetches.clear()
        self._free_buffers.clear()

    def __enter__(self) -> "ExpertStore":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def prefetch(self, index: int, experts: Iterable[int]) -> None:
        """Begin to fetch experts of the layer `index` before the layer needs them."""
        with self._closed_on_error():
            self._size_cache()
            self._release(self._used)
            self._used = set()
            self._prefetch(index, experts)

    def take(self, index: int, experts: Sequence[int]) -> list[Buffer]:
        """Fetch experts of a layer, and return their buffers, valid until the next `take` or `prefetch`."""
        with self._closed_on_error():
            self._size_cache()
            wanted = {(index, e) for e in experts}
            self._release((self._used | self._prefetched.pop(index, set())) - wanted)
            self._used = wanted
            fetches = [self._hold((index, e)) for e in experts]
            if self.policy == "prefetch-all":
                self._prefetch_next(index)
            begin = time.perf_counter()
            if self._fetcher.wait(fetches):
                self.counters.add(waits=1, seconds_waited=time.perf_counter() - begin)
            self.counters.add(calls=1, asked=len(fetches), hits=sum([fetch.use() for fetch in fetches]))
            for expert in experts:
                self._cache.note_use((index, expert))
        return [fetch.buffer for fetch in fetches]

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """After any error, including Ctrl-C, close the store, because fetches may still be pending."""
        self._fetcher.refuse_ended()
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _size_cache(self) -> None:
        """Set the size of an automatic cache at the first fetch, when the model is in memory."""
        if self._sizes_cache:
            self._sizes_cache = False
            size = self._cache.most_bytes = free_bytes(self._stacks[0][0].device) // 2
            if world.is_first():
                logger.info("--moe-expert-cache auto is %.1f MiB, half of the free memory", size / 2**20)

    def _prefetch_next(self, index: int) -> None:
        """Begin to fetch all experts of the layer that ran after the layer `index` the last time."""
        if self._last >= 0:
            self._followers[self._last] = index
        self._last = index
        follower = self._followers.get(index, (index + 1) % len(self._stacks))
        for other in set(self._prefetched) - {follower}:
            self._release(self._prefetched.pop(other))
        if follower != index:
            self._prefetch(follower, range(self._stacks[follower][0].num_local))

    def _prefetch(self, index: int, experts: Iterable[int]) -> None:
        keys = {(index, e) for e in experts}
        self._release(self._prefetched.get(index, set()) - keys)
        self._prefetched[index] = keys
        for key in sorted(keys):
            self._hold(key, ahead=True)

    def _hold(self, key: Key, ahead: bool = False) -> Fetch:
        """Return the fetch of an expert, and request it if it is new. Keep the expert until `_release`."""
        self._cache.take(key)
        if key not in self._fetches:
            stack, source = self._stacks[key[0]]
            self._fetches[key] = Fetch(source.read, key[1], self._buffer(source.layout, stack.device))
            num_bytes, counters = source.layout.num_bytes, self.counters
            self._bytes += num_bytes
            counters.add(fetches=1, bytes=num_bytes)
            counters.peak_experts = max(counters.peak_experts, len(self._fetches))
            counters.peak_bytes = max(counters.peak_bytes, self._bytes)
            self._fetcher.request(self._fetches[key], ahead)
        return self._fetches[key]

    def _buffer(self, layout: BufferLayout, device: torch.device) -> Buffer:
        """Return a free buffer for an expert, or allocate a buffer if no buffer is free."""
        free = self._free_buffers.setdefault((layout, device), [])
        if free:
            return free.pop()
        with torch.inference_mode(False):  # The fetch thread cannot write to an inference tensor.
            buffer = Buffer(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
        buffer.note_free()  # If torch reused this memory, queued kernels may still read it.
        return buffer

    def _release(self, keys: Iterable[Key]) -> None:
        """Move experts to the cache, and free the buffers of evicted experts and of cancelled fetches."""
        for key in sorted(keys):
            if self._cancel(key):
                continue
            for leaving in self._cache.put(key, self._fetches[key].buffer.layout.num_bytes):
                if not self._cancel(leaving):
                    self._fetcher.wait([self._fetches[leaving]])  # The fetch may still be running.
                    self._free(leaving)

    def _cancel(self, key: Key) -> bool:
        """Cancel a fetch that has not begun and free its buffer; return whether the fetch was cancelled."""
        fetch = self._fetches[key]
        if fetch.is_here or not self._fetcher.cancel(fetch):
            return False
        self.counters.add(cancelled=1, fetches=-1, bytes=-fetch.buffer.layout.num_bytes)
        self._free(key)
        return True

    def _free(self, key: Key) -> None:
        buffer = self._fetches.pop(key).buffer
        self._bytes -= buffer.layout.num_bytes
        buffer.note_free()
        self._free_buffers[buffer.layout, buffer.memory.device].append(buffer)


class _StoredWeights(Weights):
    """The weights of a MoE layer whose experts are in an expert store."""

    are_own = False

    def __init__(self, store: ExpertStore, index: int) -> None:
        self._store, self._index = store, index

    def of_groups(self, stack: ExpertStack, groups: Groups) -> tuple[Tensors, Groups]:
        """Fetch the experts that have rows, and return their tensors and row counts."""
        if stack.training or torch.is_grad_enabled():
            raise ValueError(
                "experts in a store are for evaluation only; call model.eval(), and use the model under "
                "torch.no_grad(), or open it without a store (--moe-expert-store resident)."
            )
        counts = groups.host
        experts = [e for e, count in enumerate(counts) if count]
        buffers = self._store.take(self._index, experts)
        kept = Groups.of_host([counts[e] for e in experts] or [0], stack.device)
        is_unpacked = self._store.compute == "unpacked"
        return {name: _tensors(stack, name, buffers, is_unpacked) for name in stack.names}, kept

    def prefetch(self, stack: ExpertStack, groups: Groups) -> None:
        """With the policy `pregated`, begin to fetch the experts of this rank that have rows."""
        if self._store.policy != "pregated":
            return  # Reading `groups.host` could make the host wait for the GPU.
        counts = groups.host[stack.first : stack.first + stack.num_local]
        self._store.prefetch(self._index, [e for e, count in enumerate(counts) if count])

    def __deepcopy__(self, memo: Any) -> "_StoredWeights":
        return self


def _tensors(stack: ExpertStack, name: str, buffers: Sequence[Buffer], is_unpacked: bool) -> Any:
    """Return the tensor `name` of the fetched experts, stacked if the kernels need one tensor."""
    like: Tensor = getattr(stack, name)
    if not buffers:  # In this call, no expert has rows.
        return torch.zeros((), dtype=like.dtype, device=stack.device).expand(1, *like.shape[1:])
    in_list = backend_for(stack.config.backend, stack.device)[0] == "reference"
    is_unpacked |= not (in_list and stack.takes_quantized and stack.device.type == "cpu")

    def make(index: int) -> Any:
        buffer = buffers[index]
        return (buffer.tensor if is_unpacked else buffer.matrix)(name, like.dtype)

    tensors = ExpertTensorList(make, (len(buffers), *like.shape[1:]), like.dtype)
    return tensors if in_list else torch.stack([tensors[index] for index in range(len(buffers))])


def free_bytes(device: torch.device) -> int:
    """Return the free memory for this rank: GPU memory, or the rank's share of the node's host memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return (host_memory.available() or 0) // (ranks_per_node() or world.size())
