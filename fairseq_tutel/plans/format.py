"""A collective plan is a JSON file that lists the steps of each rank for one collective.

A collective plan has N ranks, C chunks in each shard and S temporary chunks on each rank.

**Chunks.** A shard is the part of a buffer that belongs to one rank or, in an all_reduce, the whole buffer.
A shard is divided into C chunks of equal size. If C does not divide the number of elements of a shard, the
last chunks are short or empty. A collective plan therefore works for any number of elements, even 0. This
table gives the number of chunks in each rank's buffers and the final content of `out`. The index [g, c]
means chunk c of shard g.

| collective     | in    | out   | final content                                       |
|----------------|-------|-------|-----------------------------------------------------|
| all_gather     | C     | N * C | out[g, c] = in[c] of rank g                         |
| reduce_scatter | N * C | C     | out[c] of rank r = sum over g of in[r, c] of rank g |
| all_reduce     | C     | C     | out[c] = sum over g of in[c] of rank g              |
| all_to_all     | N * C | N * C | out[s, c] of rank r = in[r, c] of rank s            |

No step writes to the buffer `in`. Between calls, only the caller uses the buffers `in` and `out`. A rank
has two buffers `tmp` of S chunks each, which calls use in turn. A rank that is one call ahead therefore
does not overwrite data that a slower rank still reads.

**Programs.** A rank has one or more lanes, which run concurrently. A lane is an ordered list of steps:

- A put copies `src` on this rank to `dst` on the rank at the other end of the channel. A put's copy can run
  at any time until the receiver's wait for the channel's next signal ends. Until this wait ends, no step
  may read or write `dst`. Until this wait or the channel's next flush ends, no step may write `src`.
- A signal reaches the other rank after the copies of the channel's earlier puts have ended. The lane does
  not wait for these copies.
- The k-th wait on a channel waits for the channel's k-th signal.
- A flush waits until the earlier puts on a channel have read their sources.
- A copy copies `src` to `dst` on this rank.
- A reduce adds two or more `src` in the listed order, and writes the sum to `dst` on this rank. The `dst`
  of a reduce may be its first `src`. A reduce adds half-precision types in fp32 and rounds the sum once.
- A post and a pend are like a signal and a wait, but between lanes of one rank.

A channel leads from one rank to another rank. One lane of the sending rank has all puts, signals and
flushes of a channel. One lane of the receiving rank has all waits of a channel. A channel has as many waits
as signals, and a signal follows its last put.

Channels and steps are a subset of those of MSCCL++ (Shah et al. 2025).
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

FORMAT = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
REDUCING = ("reduce_scatter", "all_reduce")
BUFFERS = ("in", "out", "tmp")
# A load maps (source, target) to the amount of data that is sent from source to target.
Load = Mapping[tuple[int, int], Fraction | int]
# This table maps the operation of a step to the step's fields.
OPERATIONS = {
    "put": ("channel", "src", "dst", "n"),
    "signal": ("channel",),
    "wait": ("channel",),
    "flush": ("channel",),
    "copy": ("src", "dst", "n"),
    "reduce": ("src", "dst", "n"),
    "post": ("semaphore",),
    "pend": ("semaphore",),
}


class PlanError(ValueError):
    """A collective plan is wrong. The error message is one sentence that names the problem."""


class Place(NamedTuple):
    """The position of adjacent chunks, as their buffer and the index of the first chunk."""

    buffer: str
    chunk: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a collective plan, such as a put. `OPERATIONS` lists the fields of each operation."""

    op: str
    channel: int | None = None
    src: tuple[Place, ...] = ()
    dst: Place | None = None
    n: int = 0
    semaphore: int | None = None


class Channel(NamedTuple):
    """A channel, which carries puts and signals from one rank to another rank."""

    source: int
    target: int


Lane = tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A collective plan, which has the programs of all ranks for one collective.

    Attributes:
        programs: the lanes of each rank.
        min_bytes: the smallest number of bytes in a rank's `in` for which the plan is used.
        max_bytes: the largest number of bytes in a rank's `in`; None means no limit.
        network: the digest of the network for which the plan was made; "" means any network.
    """

    name: str
    collective: str
    ranks: int
    chunks: int
    temporary: int = 0
    channels: tuple[Channel, ...] = ()
    programs: tuple[tuple[Lane, ...], ...] = ()
    min_bytes: int = 0
    max_bytes: int | None = None
    network: str = ""

    @property
    def in_chunks(self) -> int:
        """The number of chunks in the input buffer `in` of a rank."""
        return self.chunks * (self.ranks if self.collective in ("reduce_scatter", "all_to_all") else 1)

    @property
    def out_chunks(self) -> int:
        """The number of chunks in the output buffer `out` of a rank."""
        return self.chunks * (self.ranks if self.collective in ("all_gather", "all_to_all") else 1)

    def size_of(self, buffer: str) -> int:
        """Return the number of chunks in the buffer `in`, `out` or `tmp` of a rank."""
        return {"in": self.in_chunks, "out": self.out_chunks, "tmp": self.temporary}[buffer]

    def target_of(self, rank: int, step: Step) -> int:
        """Return the rank to which a step writes. `rank` is the rank that runs the step."""
        return rank if step.channel is None else self.channels[step.channel].target

    @cached_property
    def digest(self) -> str:
        """A hash of the plan's content, written as 16 hexadecimal digits."""
        text = json.dumps(to_json(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def steps(self) -> Iterator[tuple[int, int, int, Step]]:
        """Yield (rank, lane, index, step) for every step of the plan."""
        for rank, lanes in enumerate(self.programs):
            for lane, steps in enumerate(lanes):
                for index, step in enumerate(steps):
                    yield rank, lane, index, step


Chunk = tuple[str, int]


class Writer:
    """Builds a collective plan. The methods append steps to the lanes of ranks.

    The first step on a channel creates the channel. `tag` distinguishes channels between the same ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.lanes: list[dict[int, list[Step]]] = [{} for _ in range(ranks)]
        self.channels: dict[tuple[int, int, Any], int] = {}

    def _add(self, rank: int, lane: int, step: Step) -> None:
        self.lanes[rank].setdefault(lane, []).append(step)

    def _channel(self, source: int, target: int, tag: Any) -> int:
        return self.channels.setdefault((source, target, tag), len(self.channels))

    def put(
        self, rank: int, target: int, src: Chunk, dst: Chunk, n: int = 1, *, lane: int = 0, tag: Any = 0
    ) -> None:
        """Append a put, which copies n chunks from this rank to another rank."""
        step = Step("put", self._channel(rank, target, tag), (Place(*src),), Place(*dst), n)
        self._add(rank, lane, step)

    def send(
        self, rank: int, target: int, src: Chunk, dst: Chunk, n: int = 1, *, lane: int = 0, tag: Any = 0
    ) -> None:
        """Append a put, which copies n chunks to another rank, and then a signal to that rank."""
        self.put(rank, target, src, dst, n, lane=lane, tag=tag)
        self.signal(rank, target, lane=lane, tag=tag)

    def signal(self, rank: int, target: int, *, lane: int = 0, tag: Any = 0) -> None:
        """Append a signal, for which the rank `target` can wait."""
        self._add(rank, lane, Step("signal", self._channel(rank, target, tag)))

    def wait(self, rank: int, source: int, *, lane: int = 0, tag: Any = 0) -> None:
        """Append a wait for another rank's signal."""
        self._add(rank, lane, Step("wait", self._channel(source, rank, tag)))

    def flush(self, rank: int, target: int, *, lane: int = 0, tag: Any = 0) -> None:
        """Append a flush, which waits until the puts to another rank have read their sources."""
        self._add(rank, lane, Step("flush", self._channel(rank, target, tag)))

    def copy(self, rank: int, src: Chunk, dst: Chunk, n: int = 1, *, lane: int = 0) -> None:
        """Append a copy of n chunks within a rank."""
        self.reduce(rank, [src], dst, n, lane=lane)

    def reduce(self, rank: int, sources: Iterable[Chunk], dst: Chunk, n: int = 1, *, lane: int = 0) -> None:
        """Append a reduce of n chunks from several sources, or a copy of n chunks from one source."""
        places = tuple(Place(*source) for source in sources)
        op = "reduce" if len(places) > 1 else "copy"
        self._add(rank, lane, Step(op, None, places, Place(*dst), n))

    def post(self, rank: int, semaphore: int, *, lane: int) -> None:
        """Append a post, which is a signal to another lane of the same rank."""
        self._add(rank, lane, Step("post", semaphore=semaphore))

    def pend(self, rank: int, semaphore: int, *, lane: int) -> None:
        """Append a pend, which is a wait for a post of another lane of the same rank."""
        self._add(rank, lane, Step("pend", semaphore=semaphore))

    def plan(self, name: str, collective: str, chunks: int, **others: Any) -> Plan:
        """Return a plan with all appended steps. The keywords `others` set more fields of `Plan`."""
        channels = tuple(Channel(source, target) for source, target, _ in self.channels)
        programs = tuple(tuple(tuple(lanes[lane]) for lane in sorted(lanes)) for lanes in self.lanes)
        fields = {"channels": channels, "programs": programs, **others}
        return Plan(name=name, collective=collective, ranks=self.ranks, chunks=chunks, **fields)


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the JSON object that describes a collective plan."""
    names = ("name", "collective", "ranks", "chunks", "temporary", "network", "channels")
    return {
        "format": FORMAT,
        **{name: getattr(plan, name) for name in names},
        "bytes": [plan.min_bytes, plan.max_bytes],
        "programs": [[[_step_to_json(s) for s in lane] for lane in lanes] for lanes in plan.programs],
    }


def _step_to_json(step: Step) -> dict[str, Any]:
    return {"op": step.op} | {name: getattr(step, name) for name in OPERATIONS[step.op]}


def from_json(data: Any) -> Plan:
    """Return the collective plan that a JSON object describes, without checking its steps.

    Raises:
        PlanError: a field is missing or unknown, or has a wrong value.
    """
    try:
        least, most = data.get("bytes", (0, None))
        if data["format"] != FORMAT or data["collective"] not in COLLECTIVES:
            found = data["format"], data["collective"]
            raise ValueError(f"format and collective are {found}; give {FORMAT} and one of {COLLECTIVES}")
        return Plan(
            name=str(data.get("name", "")),
            collective=data["collective"],
            ranks=_number(data["ranks"], 1),
            chunks=_number(data["chunks"], 1),
            temporary=_number(data.get("temporary", 0)),
            channels=tuple(
                Channel(_number(source), _number(target)) for source, target in data["channels"]
            ),
            programs=tuple(
                tuple(tuple(_step_of(**step) for step in lane) for lane in lanes)
                for lanes in data["programs"]
            ),
            min_bytes=_number(least),
            max_bytes=None if most is None else _number(most),
            network=str(data.get("network", "")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"This is not a collective plan: {error!r}.") from error


def _step_of(op: str, **fields: Any) -> Step:
    if set(fields) != set(OPERATIONS[op]):
        raise ValueError(f"a {op} has the fields {sorted(fields)}; give {OPERATIONS[op]}")
    src, dst, n = fields.pop("src", ()), fields.pop("dst", None), _number(fields.pop("n", 0))
    numbers = {name: _number(value) for name, value in fields.items()}
    return Step(op, src=tuple(map(_place_of, src)), dst=dst and _place_of(dst), n=n, **numbers)


def _place_of(data: Any) -> Place:
    buffer, chunk = data
    if buffer not in BUFFERS:
        raise ValueError(f'{data!r} is not a place such as ["in", 0]')
    return Place(buffer, _number(chunk))


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is not a whole number from {least} to 2^62")
    return value
