"""An expert store: experts that are in memory only while a block computes with them, or soon will.

E experts of a block (e on this rank), n of them that a call asks for.
"""

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.inference.expert_cache import ExpertCache, Key
from fairseq_tutel.inference.expert_fetcher import Fetch, Fetcher, Source
from fairseq_tutel.inference.expert_files import ShardFiles
from fairseq_tutel.inference.expert_slots import Slot, Slots
from fairseq_tutel.inference.expert_sources import source_of
from fairseq_tutel.kernels import backend_for
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.weights import Apart
from fairseq_tutel.moe.checks import cache_limits
from fairseq_tutel.moe.config import EVICTIONS, STORE_POLICIES, STORE_TIERS
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors, Weights


@dataclass
class Counters:
    """What a store did so far.

    Attributes:
        calls: of blocks.
        asked: experts with rows, over all calls.
        fetches: experts that were read, ahead or on demand.
        hits: of those asked for, how many were in memory from an earlier use.
        cancelled: experts that were to be fetched ahead, and had not been when nobody asked for them.
        bytes: that were read.
        waits: calls that had to wait for an expert.
        seconds_waited: by these.
        peak_experts: the most that were in memory at once, in the cache, too.
        peak_bytes: that these took, as they are stored.
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
        """Take note of a block's call."""
        self.calls += 1
        self.asked += asked
        self.hits += hits

    def note_fetch(self, num_bytes: int, resident: int, resident_bytes: int) -> None:
        """Take note of an expert that is read, and of how many there are with it."""
        self.fetches += 1
        self.bytes += num_bytes
        self.peak_experts = max(self.peak_experts, resident)
        self.peak_bytes = max(self.peak_bytes, resident_bytes)

    def note_cancelled(self, num_bytes: int) -> None:
        """Take note of an expert that is not read after all."""
        self.cancelled += 1
        self.fetches -= 1
        self.bytes -= num_bytes

    def note_wait(self, seconds: float) -> None:
        """Take note of a call that waited."""
        self.waits += 1
        self.seconds_waited += seconds


class ExpertStore:
    """Keeps the experts of any number of layers on disk or in host memory, and fetches those with rows.

    What a layer computes is the same to the bit as with its experts in memory; of experts that a checkpoint
    has in fewer bits, as with those that it gives. (To rounding, on a CPU, where a matrix of one expert has
    no multiple of 64 bytes: products depend on where it begins.) For evaluation alone::

        layer = ft.MoELayer(ft.MoEConfig(model_dim=512, hidden_dim=2048, num_experts=64)).eval()
        with ft.ExpertStore("on-demand", tier="host", cache=8) as store, torch.no_grad():
            store.add(layer.experts)  # of a sharded checkpoint: store.add(layer.experts, its tensors)
            y, _ = layer(torch.randn(1, 512))
            print(store.counters)

    In memory at once are, beside a cache, at most

    ==============  ===========================================================================
    on-demand       the n experts of one call
    pregated        those of two: of this block, and of the one that is expected (N + 1 of them
                    where blocks are expected N ahead)
    prefetch-all    2 E: while a block computes with its experts, all of the next one are fetched
    ==============  ===========================================================================

    One thread reads. It ends with `close`, with an error, which the next use raises, and with the process.
    A copy of a model (copy.deepcopy) shares its store; a forked process, or a second thread, needs one of
    its own; a model in one can be neither saved nor loaded anew.

    Args:
        policy: `on-demand` fetches what a call asks for, `pregated` also what `expect` names, before it is
            asked for, `prefetch-all` all experts of the next block: of the one that followed the last
            time, at first of the next that was added.
        tier: where the experts lie: `disk`, in the shard files of a checkpoint, or `host`, in memory
            (pinned where there is a GPU).
        cache: how many experts, or with a unit (`"2GiB"`) bytes of them, stay in memory beside those that
            blocks compute with.
        eviction: who leaves the cache first, see `ExpertCache`.

    Raises:
        ValueError: a word that is none of these.
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
        self._expected: dict[int, set[Key]] = {}
        self._bytes = 0
        self._slots, self._files, self._fetcher = Slots(), ShardFiles(), Fetcher()
        self._close = weakref.finalize(self, _end, self._fetcher, self._files)

    def add(self, stack: ExpertStack, tensors: Mapping[str, Any] | None = None) -> None:
        """Let a layer's experts live in the store: the stack computes with it, and frees its parameters.

        Args:
            stack: `layer.experts`.
            tensors: by name, of all E experts, or of this rank's; `ShardedTensor` of a checkpoint, or on
                tier `host` tensors. None for the stack's own, on tier `host`.

        Raises:
            ValueError: they do not fit the stack or the tier, or a file cannot be read.
        """
        self._fetcher.refuse_ended()
        own = {name: getattr(stack, name) for name in stack.names}
        source = self.source_of(stack, own if tensors is None else tensors)
        limit, size = self._cache.most_bytes, source.layout.num_bytes
        if limit is not None and 0 < limit < size:
            raise ValueError(
                f"cache (--moe-expert-cache) is {limit:,} bytes, but one expert has {size:,}; give as "
                "many, or 0 for no cache."
            )
        self._stacks.append((stack, source))
        stack.leave_to(_InStore(self, len(self._stacks) - 1))

    @property
    def is_open(self) -> bool:
        """Whether layers can be added, and called: nobody closed it, nothing went wrong, nobody forked."""
        return not self._fetcher.ended

    def close(self) -> None:
        """End the thread and close the files; layers in the store cannot be called any more."""
        self._close()
        self._stacks.clear()
        self._fetches.clear()
        self._slots.clear()

    def __enter__(self) -> "ExpertStore":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise ValueError(
            "a model whose experts are in a store cannot be saved or sent to another process; open its "
            "checkpoint there."
        )

    def source_of(self, stack: ExpertStack, tensors: Mapping[str, Any]) -> Source:
        """Return where a stack's experts are read from; see `add`."""
        return source_of(stack, tensors, self.tier, self._files)

    def expect(self, index: int, experts: Iterable[int]) -> None:
        """Begin to fetch experts of a stack that will be asked for soon."""
        with self._at_work():
            self._let_go(self._used)
            self._used = set()
            self._expect(index, experts)

    def take(self, index: int, experts: Sequence[int]) -> list[Slot]:
        """Return the slots of experts of a stack; they are valid until the next call of any block.

        Raises:
            ValueError: they cannot be fetched.
        """
        with self._at_work():
            wanted, was_expected = {(index, e) for e in experts}, self._expected.pop(index, set())
            self._let_go((self._used | was_expected) - wanted)
            self._used = wanted
            fetches = [self._hold((index, e)) for e in experts]
            if self.policy == "prefetch-all":
                self._expect_next(index)
            self._wait(fetches)
            self.counters.note_call(len(fetches), sum([fetch.use() for fetch in fetches]))
            for expert in experts:
                self._cache.note_use((index, expert))
        return [fetch.slot for fetch in fetches]

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """End the thread where something goes wrong within, Ctrl-C too: what is under way is nobody's."""
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

    def _expect_next(self, index: int) -> None:
        """Fetch all experts of the block that followed this one the last time."""
        if self._last >= 0:
            self._followers[self._last] = index
        self._last = index
        follower = self._followers.get(index, (index + 1) % len(self._stacks))
        for other in set(self._expected) - {follower}:
            self._let_go(self._expected.pop(other))
        if follower != index:
            self._expect(follower, range(self._stacks[follower][0].num_local))

    def _expect(self, index: int, experts: Iterable[int]) -> None:
        expected = {(index, e) for e in experts}
        self._let_go(self._expected.get(index, set()) - expected)
        self._expected[index] = expected
        for key in sorted(expected):
            self._hold(key, ahead=True)

    def _hold(self, key: Key, ahead: bool = False) -> Fetch:
        """Return an expert that no other takes the place of until it is let go."""
        self._cache.take(key)
        if key not in self._fetches:
            stack, source = self._stacks[key[0]]
            slot = self._slots.take(source.layout, stack.device)
            self._fetches[key] = Fetch(source, key[1], slot)
            self._cache.note_fetch(key)
            self._bytes += source.layout.num_bytes
            self.counters.note_fetch(source.layout.num_bytes, len(self._fetches), self._bytes)
            self._fetcher.ask(self._fetches[key], ahead)
        return self._fetches[key]

    def _let_go(self, keys: Iterable[Key]) -> None:
        """Give experts to the cache, and what leaves it, or was not read yet, to who comes next."""
        for key in sorted(keys):
            fetch = self._fetches[key]
            num_bytes = fetch.slot.layout.num_bytes
            if not fetch.is_here and self._fetcher.cancel(fetch):
                self.counters.note_cancelled(num_bytes)
                self._free(key)
                continue
            for leaving in self._cache.put(key, num_bytes):
                self._fetcher.wait([self._fetches[leaving]])  # it may be read just now
                self._free(leaving)

    def _free(self, key: Key) -> None:
        slot = self._fetches.pop(key).slot
        self._bytes -= slot.layout.num_bytes
        self._slots.give(slot)


class _InStore(Weights):
    """The tensors of a stack in a store."""

    are_own = False

    def __init__(self, store: ExpertStore, index: int) -> None:
        self._store, self._index = store, index

    def of_groups(self, stack: ExpertStack, groups: Groups) -> tuple[Tensors, Groups]:
        """Return the tensors of the experts with rows, and their groups."""
        if stack.training or torch.is_grad_enabled():
            raise ValueError(
                "experts in a store are for evaluation alone; call model.eval(), and the model under "
                "torch.no_grad(), or open it without a store (--moe-expert-store resident)."
            )
        counts = groups.host
        experts = [e for e, count in enumerate(counts) if count]
        slots = self._store.take(self._index, experts)
        kept = Groups.of_host([counts[e] for e in experts] or [0], stack.device)
        return {name: _tensors(stack, name, slots) for name in stack.names}, kept

    def expect(self, stack: ExpertStack, groups: Groups) -> None:
        """Begin to fetch the experts with rows of this rank's tokens, under `pregated`."""
        if self._store.policy != "pregated":
            return  # the host would wait for the counts for nothing
        counts = groups.host[stack.first : stack.first + stack.num_local]
        self._store.expect(self._index, [e for e, count in enumerate(counts) if count])

    def __deepcopy__(self, memo: Any) -> "_InStore":
        return self


def _tensors(stack: ExpertStack, name: str, slots: Sequence[Slot]) -> Any:
    """Return a tensor of n experts by its name, in a stack where kernels want one."""
    like: Tensor = getattr(stack, name)
    if not slots:  # one expert without rows, which is enough to know shapes by
        return torch.zeros((), dtype=like.dtype, device=stack.device).expand(1, *like.shape[1:])
    apart = Apart(
        lambda index: slots[index].tensor(name, like.dtype),
        (len(slots), *like.shape[1:]),
        like.dtype,
    )
    if backend_for(stack.config.backend, stack.device)[0] == "reference":
        return apart
    return torch.stack([apart[index] for index in range(len(slots))])


def _refuse_unknown(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(
            f"{argument} of an expert store is {value!r}; choose from {', '.join(known)}."
        )


def _end(fetcher: Fetcher, files: ShardFiles) -> None:
    fetcher.end(
        "the expert store is closed; make another, and add the layers of a model opened anew."
    )
    files.close()
