"""Reads MSCCL's XML files and converts them to collective plans.

An MSCCL file has one `gpu` element for each rank, with thread blocks (`tb`). A thread block has a peer to
send to, a peer to receive from, and a channel. The `step`s of a thread block run in order. Each step also
waits for the step on which it depends. The buffers i, o and s are the input, output and scratch buffer.

| type | does               | type | does                               | type | does                |
|------|--------------------|------|------------------------------------|------|---------------------|
| s    | send src           | rrc  | receive, add src, write dst        | cpy  | copy src to dst     |
| r    | receive to dst     | rrs  | receive, add src, send             | re   | add src to dst      |
| rcs  | same as r, and send| rrcs | receive, add src, write dst, send  | nop  | wait for a step     |

In MSCCL, the receiver chooses the position of a message when it receives the message, and the sender may be
ahead. A put directly to the position of a message would race with earlier accesses. Each message therefore
gets separate chunks of `tmp`, which the receiver's step copies or adds. Each thread block becomes a lane,
and dependencies between blocks become posts and pends. A flush precedes each overwrite of a put's source.

If an algorithm runs in place (inplace is 1 and outofplace is not), it uses only `out`, to which `in` is
copied first. For an in-place reduce_scatter, a part of `tmp` replaces `out`.

The format is from MSCCLang (Cowan et al. 2023), and the meaning of the steps from MSCCL's interpreter.
"""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from fairseq_tutel.plans.format import Place, Plan, PlanError, Writer

COLLECTIVES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "reduce_scatter": "reduce_scatter",
}
BUFFERS = {"i": "in", "o": "out", "s": "tmp"}
TYPES = ("s", "r", "rcs", "rrc", "rrs", "rrcs", "cpy", "re", "nop")
RECEIVING = ("r", "rcs", "rrc", "rrs", "rrcs")
SENDING = ("s", "rcs", "rrs", "rrcs")
READING = ("s", "rrc", "rrs", "rrcs", "cpy", "re")  # MSCCL steps of these types read src.
STORING = ("r", "rcs", "rrc", "rrcs", "cpy", "re")  # MSCCL steps of these types write dst.
LARGEST = 1 << 16  # A file has at most this many chunks, ranks or steps.
Cell = tuple[str, int]
Way = tuple[int, int, int]  # A way is (source rank, target rank, channel).


class _Step(NamedTuple):
    """A step of a thread block. `after` is the (block, step) on which the step depends."""

    type: str
    sources: tuple[Place, ...]
    dst: Place
    n: int
    after: tuple[int, int] | None


class _Block(NamedTuple):
    """A thread block of an MSCCL file, with peer ranks (-1 means none), a channel and steps."""

    send: int
    recv: int
    chan: int
    steps: list[_Step]


def from_xml(text: str | bytes) -> Plan:
    """Convert the XML text of an MSCCL algorithm to a collective plan, without checking the plan's steps.

    Raises:
        PlanError: the text is malformed, or cannot be converted. The error message names the XML element.
    """
    algorithm = _parse(text)
    ranks = _number(algorithm, "ngpus", 1)
    coll = algorithm.get("coll", "")
    _demand(coll in COLLECTIVES, f"coll is {coll!r}; give one of {', '.join(COLLECTIVES)}")
    loop = _number(algorithm, "nchunksperloop", 1)
    parts = 1 if coll == "allreduce" else ranks
    _demand(loop % parts == 0, f"nchunksperloop is {loop}; give a multiple of the {ranks} ranks")
    scale = ranks if coll == "allgather" else 1  # MSCCL's byte range is for a rank's output.
    most = _number(algorithm, "maxBytes", 0, "0", most=1 << 62)
    plan = Plan(
        name=algorithm.get("name", ""),
        collective=COLLECTIVES[coll],
        ranks=ranks,
        chunks=loop // parts,
        min_bytes=-(-_number(algorithm, "minBytes", 0, "0", most=1 << 62) // scale),
        max_bytes=most // scale if most else None,
    )
    scratch = max((_number(gpu, "s_chunks", 0, "0") for gpu in algorithm), default=0)
    in_place = algorithm.get("inplace") == "1" and algorithm.get("outofplace") != "1"
    copies = in_place and coll == "reduce_scatter"
    programs: dict[int, list[_Block]] = {}
    homes: dict[int, dict[str, Place]] = {}
    for gpu in algorithm:
        rank = _number(gpu, "id")
        _demand(gpu.tag == "gpu" and rank < ranks, f"<{gpu.tag}> {rank} is not a gpu with id < {ranks}")
        homes[rank] = {name: Place(name, 0) for name in BUFFERS.values()}
        if copies:
            homes[rank]["in"] = Place("tmp", scratch)
            homes[rank]["out"] = Place("tmp", scratch + rank * plan.chunks)
        elif in_place:
            homes[rank]["in"] = Place("out", rank * plan.chunks if coll == "allgather" else 0)
        sizes = {"in": plan.in_chunks, "out": plan.out_chunks, "tmp": _number(gpu, "s_chunks", 0, "0")}
        programs[rank] = _blocks_of(gpu, rank, ranks, sizes, homes[rank])
    _demand(len(programs) == ranks, f"it has {len(programs)} gpus with different ids; give {ranks}")
    landings, temporary = _land(programs, scratch + plan.in_chunks * copies)
    w = Writer(ranks)
    for rank, blocks in sorted(programs.items()):
        _write_rank(w, rank, plan, blocks, homes[rank], landings)
    fields = {"temporary": temporary, "min_bytes": plan.min_bytes, "max_bytes": plan.max_bytes}
    return w.plan(plan.name, plan.collective, plan.chunks, **fields)


def _parse(text: str | bytes) -> ET.Element:
    """Return the root element of an MSCCL file's XML."""
    try:
        root = ET.fromstring(text)  # The XML parser limits the expansion of entities.
    except (ET.ParseError, LookupError, ValueError) as error:
        raise PlanError(f"This is not an MSCCL algorithm: {error}.") from None
    _demand(root.tag == "algo", f"its root element is {root.tag!r}; give 'algo'")
    return root


def _blocks_of(
    gpu: ET.Element, rank: int, ranks: int, sizes: Mapping[str, int], homes: Mapping[str, Place]
) -> list[_Block]:
    blocks: list[_Block] = []
    for index, tb in enumerate(gpu):
        where = f"gpu {rank}, tb {index}"
        _demand(tb.tag == "tb" and _number(tb, "id") == index, f"{where} is not a tb with this id")
        send, recv = _number(tb, "send", -1, "-1"), _number(tb, "recv", -1, "-1")
        is_peer = max(send, recv) < ranks and rank not in (send, recv)
        _demand(is_peer, f"{where} has the peers {send} and {recv}; give other ranks below {ranks}")
        steps = [_step_of(step, at, where, sizes, homes) for at, step in enumerate(tb)]
        for at, step in enumerate(steps):
            lacks = (step.type in SENDING and send < 0) or (step.type in RECEIVING and recv < 0)
            _demand(not lacks, f"{where}, step {at} ({step.type}) needs a peer, but the tb has none")
        blocks.append(_Block(send, recv, _number(tb, "chan", -1, "0"), steps))
    for index, block in enumerate(blocks):
        for at, step in enumerate(block.steps):
            other, before = step.after or (index, -1)
            known = blocks[other].steps[: at if other == index else None] if other < len(blocks) else []
            where = f"gpu {rank}, tb {index}, step {at} depends on tb {other}, step {before}"
            _demand(before < len(known), f"{where}, which does not run before it")
    return blocks


def _step_of(
    step: ET.Element, at: int, where: str, sizes: Mapping[str, int], homes: Mapping[str, Place]
) -> _Step:
    where = f"{where}, step {at}"
    _demand(step.tag == "step" and _number(step, "s") == at, f"{where} is not a step with this number")
    kind = step.get("type", "")
    _demand(kind in TYPES, f"{where} has the type {kind!r}; give one of {', '.join(TYPES)}")
    n = 0 if kind == "nop" else _number(step, "cnt", 1)
    places: list[Place] = []
    for end, users in (("src", READING), ("dst", STORING)):
        place = Place("in", 0)
        if kind in users:
            letter, chunk = step.get(f"{end}buf", ""), _number(step, f"{end}off")
            _demand(letter in BUFFERS, f"{where} has the {end}buf {letter!r}; give i, o or s")
            home, size = homes[BUFFERS[letter]], sizes[BUFFERS[letter]]
            _demand(chunk + n <= size, f"{where} goes beyond the {size} chunks of {end}buf")
            place = Place(home.buffer, home.chunk + chunk)
        places.append(place)
    block, before = (_number(step, name, -1, "-1") for name in ("depid", "deps"))
    after = (block, before) if block >= 0 and before >= 0 else None
    src, dst = places
    return _Step(kind, (dst, src) if kind == "re" else (src,), dst, n, after)


def cells_of(place: Place, n: int) -> set[Cell]:
    """Return n adjacent chunks, starting at `place`, as a set of (buffer, chunk)."""
    return {(place.buffer, place.chunk + i) for i in range(n)}


def _land(programs: Mapping[int, list[_Block]], base: int) -> tuple[Mapping[Way, list[Place]], int]:
    """Return where messages arrive, by (source, target, channel), and the size of `tmp`."""
    sent: dict[Way, list[int]] = defaultdict(list)
    received: dict[Way, list[int]] = defaultdict(list)
    landings: dict[Way, list[Place]] = defaultdict(list)
    temporary = base
    for rank, blocks in programs.items():
        free = base
        for block in blocks:
            for way, types, sizes in (
                ((rank, block.send, block.chan), SENDING, sent),
                ((block.recv, rank, block.chan), RECEIVING, received),
            ):
                sizes[way] += [step.n for step in block.steps if step.type in types]
            for step in block.steps:
                if step.type in RECEIVING:
                    landings[block.recv, rank, block.chan].append(Place("tmp", free))
                    free += step.n
        temporary = max(temporary, free)
    for way in sorted({*sent, *received}):
        given, expected = sent[way], received[way]
        names = "gpu {} sends to gpu {} on channel {}".format(*way)
        _demand(
            given == expected, f"{names} messages of {given} chunks, but the receiver expects {expected}"
        )
    return landings, temporary


def _write_rank(
    w: Writer,
    rank: int,
    plan: Plan,
    blocks: list[_Block],
    homes: Mapping[str, Place],
    landings: Mapping[Way, list[Place]],
) -> None:
    """Add the steps of one rank to the plan, with one lane for each thread block."""
    semaphores: dict[tuple[int, int], int] = {}  # Maps (posting lane, pending lane) to a semaphore.

    def post(lane: int, other: int) -> None:
        w.post(rank, semaphores.setdefault((lane, other), len(semaphores)), lane=lane)

    def pend(lane: int, other: int) -> None:
        w.pend(rank, semaphores.setdefault((other, lane), len(semaphores)), lane=lane)

    pends, posts = _dependencies(blocks)
    stored = [_stored(block) for block in blocks]
    if homes["in"].buffer != "in":
        w.copy(rank, ("in", 0), homes["in"], plan.in_chunks)
        for lane in range(1, len(blocks)):
            post(0, lane)
            pend(lane, 0)
    for lane, block in enumerate(blocks):
        elsewhere = set[Cell]().union(*stored[:lane], *stored[lane + 1 :])
        arriving = iter(landings.get((block.recv, rank, block.chan), ()))
        leaving = iter(landings.get((rank, block.send, block.chan), ()))
        unread: set[Cell] = set()  # The sources of puts since the last flush.
        for at, step in enumerate(block.steps):
            if (lane, at) in pends:
                pend(lane, pends[lane, at])
            arrived: tuple[Place, ...] = ()
            if step.type in RECEIVING:
                w.wait(rank, block.recv, lane=lane, tag=block.chan)
                arrived = (next(arriving),)
            sources, dst, leaves = _effect(step, arrived)
            if sources and unread & cells_of(dst, step.n):
                w.flush(rank, block.send, lane=lane, tag=block.chan)
                unread = set()
            if sources and sources != (dst,):
                w.reduce(rank, sources, dst, step.n, lane=lane)
            if leaves:
                w.send(rank, block.send, leaves, next(leaving), step.n, lane=lane, tag=block.chan)
                unread |= cells_of(leaves, step.n)
            if posts[lane, at] and unread & elsewhere:
                w.flush(rank, block.send, lane=lane, tag=block.chan)
                unread = set()
            for other in posts[lane, at]:
                post(lane, other)
        if any(buffer != "tmp" for buffer, _ in unread):
            w.flush(rank, block.send, lane=lane, tag=block.chan)
    if homes["out"].buffer != "out":
        for lane in range(1, len(blocks)):
            post(lane, 0)
            pend(0, lane)
        w.copy(rank, homes["out"], ("out", 0), plan.out_chunks)


def _effect(step: _Step, arrived: tuple[Place, ...]) -> tuple[tuple[Place, ...], Place, Place | None]:
    """Return the sources that a step copies or sums, its destination, and the position that it sends."""
    sources, dst = step.sources, step.dst
    match step.type:
        case "cpy" | "re":
            return sources, dst, None
        case "s":
            return (), dst, sources[0]
        case "r":
            return arrived, dst, None
        case "rcs":
            return arrived, dst, arrived[0]
        case "rrc":
            return (*sources, *arrived), dst, None
        case "rrs":
            return (*arrived, *sources), arrived[0], arrived[0]
        case "rrcs":
            return (*sources, *arrived), dst, dst
    return (), dst, None


def _stored(block: _Block) -> set[Cell]:
    """Return the chunks that the steps of a thread block write."""
    steps = (step for step in block.steps if step.type in STORING)
    return {cell for step in steps for cell in cells_of(step.dst, step.n)}


def _dependencies(
    blocks: list[_Block],
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], list[int]]]:
    """Return two dicts by (block, step): the block that a step awaits, and the blocks that await a step."""
    pends: dict[tuple[int, int], int] = {}
    posts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for lane, block in enumerate(blocks):
        known = {lane: len(block.steps)}
        for at, step in enumerate(block.steps):
            if step.after is not None and known.get(step.after[0], -1) < step.after[1]:
                known[step.after[0]] = step.after[1]
                pends[lane, at] = step.after[0]
                posts[step.after].append(lane)
    return pends, posts


def _number(
    element: ET.Element, name: str, least: int = 0, default: str = "", *, most: int = LARGEST
) -> int:
    text = element.get(name, default)
    value = int(text) if re.fullmatch("-?[0-9]{1,19}", text) else least - 1
    wanted = f"give a whole number from {least} to {most}"
    _demand(least <= value <= most, f"{name} of <{element.tag}> is {text[:40]!r}; {wanted}")
    return value


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PlanError(f"This is not an MSCCL algorithm: {otherwise}.")
