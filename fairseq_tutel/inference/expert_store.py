"""An expert store: offloaded experts, which are in memory only while a block uses them, or soon will.

E experts of a block (e on this rank), n of them with rows in a call.
"""

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.inference.expert_buffers import Buffer, BufferPool
from fairseq_tutel.inference.expert_cache import ExpertCache, Key
from fairseq_tutel.inference.expert_fetcher import Fetch, Fetcher, Source
from fairseq_tutel.inference.expert_files import ShardFiles
from fairseq_tutel.inference.expert_sources import source_of
from fairseq_tutel.kernels import backend_for
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.weights import ExpertTensorList
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors, Weights
from fairseq_tutel.moe.store_options import EVICTIONS, STORE_POLICIES, STORE_TIERS, cache_limits


@dataclass
class Counters:
    """Statistics of a store.

    Attributes:
        calls: of blocks.
        asked: experts with rows, summed over calls.
        fetches: experts that were read, ahead or on demand.
        hits: experts with rows that were in memory from an earlier use.
        cancelled: fetches ahead that were cancelled before they began.
        bytes: that were read.
        waits: calls that waited for an expert.
        seconds_waited: by these calls.
        peak_experts: the largest number in memory, with the cache.
        peak_bytes: of these, in their stored format.
    """

    calls: int = 0
    asked: int = 0
    fetches: int = 0
    hits: int = 0
    cancelled: int = 0
    bytes: int = 0
    waits: int = 0
    seconds_waited: float = 0.0
    peak_experts: int = 0
    peak_bytes: int = 0

    def note_call(self, asked: int, hits: int) -> None:
        """Record a block's call."""
        self.calls += 1
        self.asked += asked
        self.hits += hits

    def note_fetch(self, num_bytes: int, resident: int, resident_bytes: int) -> None:
        """Record a read expert, and the experts in memory with it."""
        self.fetches += 1
        self.bytes += num_bytes
        self.peak_experts = max(self.peak_experts, resident)
        self.peak_bytes = max(self.peak_bytes, resident_bytes)

    def note_cancelled(self, num_bytes: int) -> None:
        """Record that a fetch was cancelled."""
        self.cancelled += 1
        self.fetches -= 1
        self.bytes -= num_bytes

    def note_wait(self, seconds: float) -> None:
        """Record that a call waited."""
        self.waits += 1
        self.seconds_waited += seconds


class ExpertStore:
    """Keeps the experts of layers on disk or in host memory, and fetches those with rows.

    The outputs are bit-identical to those with experts in memory, also for quantized experts. On a CPU they
    can differ by rounding if the bytes of an expert's matrix are no multiple of 64, since products depend
    on the alignment. For evaluation only::

        layer = ft.MoELayer(ft.MoEConfig(model_dim=512, hidden_dim=2048, num_experts=64)).eval()
        with ft.ExpertStore("on-demand", tier="host", cache=8) as store, torch.no_grad():
            store.add(layer.experts)  # of a sharded checkpoint: store.add(layer.experts, its tensors)
            y, _ = layer(torch.randn(1, 512))
            print(store.counters)

    Experts in memory at the same time, in addition to the cache:

    ==============  ===========================================================================
    on-demand       the n experts of one call
    pregated        those of two calls: of this block and of the prefetched one (of N + 1 calls if
                    blocks are prefetched N ahead)
    prefetch-all    2 E: while a block computes, all experts of the next block are fetched
    ==============  ===========================================================================

    One thread reads. It ends with `close`, with the process, or with an error, which the next use raises.
    A deep copy of a model shares its store. A forked process or a second thread needs its own store. A
    model in a store can be neither saved nor loaded.

    Args:
        policy: `on-demand` fetches the experts of a call; `pregated` also those of `prefetch`;
            `prefetch-all` all experts of the next block, which is the one that followed the last time, at
            first the one that was added next.
        tier: `disk` for the shard files of a checkpoint, or `host` for memory (pinned if there is a GPU).
        cache: the cache size in experts or, with a unit (`"2GiB"`), in bytes.
        eviction: of the cache; see `ExpertCache`.

    Raises:
        ValueError: an unknown policy, tier or eviction.
    """

    def __init__(
        self,
        policy: str = "on-demand",
        tier: str = "disk",
        cache: int | str = 0,
        eviction: str = "lfu",
    ) -> None:
        _refuse_unknown("policy", policy, STORE_POLICIES)
        _refuse_unknown("tier", tier, STORE_TIERS)
        _refuse_unknown("eviction", eviction, EVICTIONS)
        self.policy, self.tier = policy, tier
        self.counters = Counters()
        self._cache = ExpertCache(eviction, *cache_limits(cache))
        self._stacks: list[tuple[ExpertStack, Source]] = []
        self._followers: dict[int, int] = {}
        self._last = -1
        self._fetches: dict[Key, Fetch] = {}
        self._used: set[Key] = set()
        self._prefetched: dict[int, set[Key]] = {}
        self._bytes = 0
        self._buffers, self._files, self._fetcher = BufferPool(), ShardFiles(), Fetcher()
        self._close = weakref.finalize(self, _end, self._fetcher, self._files)

    def add(self, stack: ExpertStack, tensors: Mapping[str, Any] | None = None) -> None:
        """Offload a layer's experts to the store, and free the stack's parameters.

        Args:
            stack: `layer.experts`.
            tensors: by name, of all E experts or of this rank's: `ShardedTensor`s of a checkpoint or, on
                tier `host`, tensors. None for the stack's own, on tier `host`.

        Raises:
            ValueError: the tensors do not fit the stack or the tier, or a file cannot be read.
        """
        self._fetcher.refuse_ended()
        own = {name: getattr(stack, name) for name in stack.names}
        source = self.source_of(stack, own if tensors is None else tensors)
        limit, size = self._cache.most_bytes, source.layout.num_bytes
        if limit is not None and 0 < limit < size:
            raise ValueError(
                f"cache (--moe-expert-cache) is {limit:,} bytes, but one expert has {size:,}; give at "
                "least that, or 0 for no cache."
            )
        self._stacks.append((stack, source))
        stack.offload_to(_StoredWeights(self, len(self._stacks) - 1))

    @property
    def is_open(self) -> bool:
        """Whether layers can be added and called: not closed, without an error, in the same process."""
        return not self._fetcher.ended

    def close(self) -> None:
        """End the thread and close the files; layers in the store can no longer be called."""
        self._close()
        self._stacks.clear()
        self._fetches.clear()
        self._buffers.clear()

    def __enter__(self) -> "ExpertStore":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise ValueError(
            "a model whose experts are in a store cannot be pickled or sent to another process; open its "
            "checkpoint there."
        )

    def source_of(self, stack: ExpertStack, tensors: Mapping[str, Any]) -> Source:
        """Return the source of a stack's experts; see `add`."""
        return source_of(stack, tensors, self.tier, self._files)

    def prefetch(self, index: int, experts: Iterable[int]) -> None:
        """Begin to fetch experts of a stack."""
        with self._closed_on_error():
            self._release(self._used)
            self._used = set()
            self._prefetch(index, experts)

    expect = prefetch  # the former name

    def take(self, index: int, experts: Sequence[int]) -> list[Buffer]:
        """Return the buffers of experts of a stack; they are valid until the next call of any block.

        Raises:
            ValueError: an expert cannot be fetched.
        """
        with self._closed_on_error():
            wanted, was_prefetched = (
                {(index, e) for e in experts},
                self._prefetched.pop(index, set()),
            )
            self._release((self._used | was_prefetched) - wanted)
            self._used = wanted
            fetches = [self._hold((index, e)) for e in experts]
            if self.policy == "prefetch-all":
                self._prefetch_next(index)
            self._wait(fetches)
            self.counters.note_call(len(fetches), sum([fetch.use() for fetch in fetches]))
            for expert in experts:
                self._cache.note_use((index, expert))
        return [fetch.buffer for fetch in fetches]

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the store on any error, Ctrl-C included, since pending fetches are abandoned."""
        self._fetcher.refuse_ended()
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _wait(self, fetches: Sequence[Fetch]) -> None:
        begin = time.perf_counter()
        if self._fetcher.wait(fetches):
            self.counters.note_wait(time.perf_counter() - begin)

    def _prefetch_next(self, index: int) -> None:
        """Fetch all experts of the block that followed this one the last time."""
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
        """Return the fetch of an expert, which stays in memory until it is released."""
        self._cache.take(key)
        if key not in self._fetches:
            stack, source = self._stacks[key[0]]
            buffer = self._buffers.take(source.layout, stack.device)
            self._fetches[key] = Fetch(source, key[1], buffer)
            self._cache.note_fetch(key)
            self._bytes += source.layout.num_bytes
            self.counters.note_fetch(source.layout.num_bytes, len(self._fetches), self._bytes)
            self._fetcher.request(self._fetches[key], ahead)
        return self._fetches[key]

    def _release(self, keys: Iterable[Key]) -> None:
        """Move experts to the cache; free the buffers of evicted ones and of cancelled fetches."""
        for key in sorted(keys):
            fetch = self._fetches[key]
            num_bytes = fetch.buffer.layout.num_bytes
            if not fetch.is_here and self._fetcher.cancel(fetch):
                self.counters.note_cancelled(num_bytes)
                self._free(key)
                continue
            for leaving in self._cache.put(key, num_bytes):
                self._fetcher.wait([self._fetches[leaving]])  # it may be under way
                self._free(leaving)

    def _free(self, key: Key) -> None:
        buffer = self._fetches.pop(key).buffer
        self._bytes -= buffer.layout.num_bytes
        self._buffers.give(buffer)


class _StoredWeights(Weights):
    """The tensors of a stack in a store."""

    are_own = False

    def __init__(self, store: ExpertStore, index: int) -> None:
        self._store, self._index = store, index

    def of_groups(self, stack: ExpertStack, groups: Groups) -> tuple[Tensors, Groups]:
        """Return the tensors and groups of the experts with rows."""
        if stack.training or torch.is_grad_enabled():
            raise ValueError(
                "experts in a store are for evaluation only; call model.eval(), and use the model under "
                "torch.no_grad(), or open it without a store (--moe-expert-store resident)."
            )
        counts = groups.host
        experts = [e for e, count in enumerate(counts) if count]
        buffers = self._store.take(self._index, experts)
        kept = Groups.of_host([counts[e] for e in experts] or [0], stack.device)
        return {name: _tensors(stack, name, buffers) for name in stack.names}, kept

    def prefetch(self, stack: ExpertStack, groups: Groups) -> None:
        """Begin to fetch the local experts with rows, with policy `pregated`."""
        if self._store.policy != "pregated":
            return  # avoids a host read of the counts
        counts = groups.host[stack.first : stack.first + stack.num_local]
        self._store.prefetch(self._index, [e for e, count in enumerate(counts) if count])

    def __deepcopy__(self, memo: Any) -> "_StoredWeights":
        return self


def _tensors(stack: ExpertStack, name: str, buffers: Sequence[Buffer]) -> Any:
    """Return a tensor of n experts by name, stacked if the kernels need it."""
    like: Tensor = getattr(stack, name)
    if not buffers:  # one expert without rows, for its shapes
        return torch.zeros((), dtype=like.dtype, device=stack.device).expand(1, *like.shape[1:])
    apart = ExpertTensorList(
        lambda index: buffers[index].tensor(name, like.dtype),
        (len(buffers), *like.shape[1:]),
        like.dtype,
    )
    if backend_for(stack.config.backend, stack.device)[0] == "reference":
        return apart
    return torch.stack([apart[index] for index in range(len(buffers))])


def _refuse_unknown(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{argument} of an expert store is {value!r}; choose from {', '.join(known)}.")


def _end(fetcher: Fetcher, files: ShardFiles) -> None:
    fetcher.end("the expert store is closed; create another one and open the model again.")
    files.close()
