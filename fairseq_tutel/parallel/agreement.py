"""Check that all ranks have the same options and environment before their first collective.

Every rank writes its facts (names and values) and their digest to the rendezvous store. Rank 0 compares W
digests and reads the facts once for each distinct digest. It writes a verdict that all ranks read.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fairseq_tutel.parallel import guard, world

# Without a time-out option: equal to the time-out of torch's rendezvous.
DEFAULT_TIMEOUT = timedelta(minutes=30)
# Ranks read about a failure from rank 0, so rank 0 must give up before them and exit after them.
MARGIN = timedelta(seconds=10)
SHOWN_FACTS = 3
SHOWN_CHARACTERS = 80
NOTHING = object()

# The number of calls of `agree`, equal on all ranks; a new default group starts at 0.
_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def agree(facts: Mapping[str, Any]) -> None:
    """Check that all ranks have the same facts, such as the values of command-line options.

    `facts` maps names, as users see them, to values. Every rank must call it equally often.

    Raises:
        ValueError: ranks differ; all ranks get the same message, with option, values and fix.
        CommunicationError: a rank did not arrive within the time-out of `guard.set_timeout`.
    """
    if world.size() == 1:
        return
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    numbers = _numbers.setdefault(distributed_c10d._get_default_group(), itertools.count())
    prefix = f"fairseq_tutel/agree/{next(numbers)}"
    timeout = guard.timeout_of_groups() or DEFAULT_TIMEOUT
    text = json.dumps(facts, sort_keys=True, default=str)
    operation = "the comparison of all ranks' options"
    with guard.watched(operation), guard.guarded(operation):
        store.set(f"{prefix}/facts/{rank}", text)
        store.set(f"{prefix}/digest/{rank}", hashlib.sha256(text.encode()).hexdigest())
        if rank == 0:
            store.set(f"{prefix}/verdict", json.dumps(_compare(store, prefix, timeout)))
        store.wait([f"{prefix}/verdict"], timeout + MARGIN)
        late, sentence = json.loads(store.get(f"{prefix}/verdict"))
        if sentence and rank > 0:
            store.set(f"{prefix}/read/{rank}", "read")
        elif sentence:
            # Others cannot read the verdict after the process with the store has ended.
            came = [r for r in range(1, dist.get_world_size()) if r not in late]
            guard.wait_for(store, f"{prefix}/read", came, MARGIN.total_seconds())
    if late:
        raise guard.CommunicationError(sentence)
    if sentence:
        raise ValueError(sentence)


def _compare(store: dist.Store, prefix: str, timeout: timedelta) -> tuple[list[int], str]:
    """Compare all ranks' facts; return the missing ranks and an error message, both empty if all agree."""
    ranks = range(dist.get_world_size())
    start = time.monotonic()
    try:
        store.wait([f"{prefix}/digest/{rank}" for rank in ranks], timeout)
    except RuntimeError:
        late = guard.absent(store, f"{prefix}/digest", ranks)
        name = guard.name_ranks(late)
        return late, (
            f"{name} did not reach the comparison of all ranks' options within "
            f"{time.monotonic() - start:.0f} s; look at the log of {name}, or raise --moe-comm-timeout "
            "if it is only slow to start."
        )
    alike: dict[bytes, list[int]] = {}
    for rank in ranks:
        alike.setdefault(store.get(f"{prefix}/digest/{rank}"), []).append(rank)
    if len(alike) == 1:
        return [], ""
    parties = [(same, json.loads(store.get(f"{prefix}/facts/{same[0]}"))) for same in alike.values()]
    return [], _sentence(parties)


def _sentence(parties: list[tuple[list[int], dict[str, Any]]]) -> str:
    """Return an error message that names the facts, such as options, that differ between ranks.

    A party is a list of ranks and the facts that they share.
    """
    names = sorted({name for _, facts in parties for name in facts})
    differing = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for ranks, facts in parties:
            ranks_of.setdefault(_text(facts.get(name, NOTHING)), []).extend(ranks)
        if len(ranks_of) > 1:
            is_long = max(map(len, ranks_of)) > SHOWN_CHARACTERS
            alike = _alike(list(ranks_of)) if is_long else 0
            values = (
                f"{_shown(text, alike)} on {guard.name_ranks(sorted(on))}" for text, on in ranks_of.items()
            )
            differing.append(f"{name} is {' and '.join(values)}")
    more = len(differing) - SHOWN_FACTS
    others = f" ({more} more differ)" if more > 0 else ""
    return (
        f"{', '.join(differing[:SHOWN_FACTS])}{others}; start all ranks with the same command, packages "
        "and data."
    )


def _text(value: Any) -> str:
    if value is NOTHING:
        return "missing"
    return value if isinstance(value, str) and value else json.dumps(value)


def _alike(texts: list[str]) -> int:
    """Return the number of characters in the longest common prefix of the texts."""
    columns = zip(*texts, strict=False)
    return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))


def _shown(text: str, alike: int) -> str:
    """Shorten a text for a message, and omit most of a long prefix that it shares with other texts."""
    if alike > SHOWN_CHARACTERS // 2:
        text = "…" + text[alike - SHOWN_CHARACTERS // 4 :]
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
