"""Removes copies from `tmp` to `out` that two-sided messages do not need.

A rank that puts data into another rank's `out` must first know that the other rank has begun the call. Some
plans avoid this wait: they put data into `tmp`, and the receiver copies it to `out`. With send and receive,
the receiver chooses the place, so the message can go to `out` at once.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fairseq_tutel.plans.executors.layout import Move
from fairseq_tutel.plans.format import Place

Part = tuple[int, int]  # the index of a move, and of one of its chunks


def received_directly(moves: Sequence[Move], rank: int) -> list[Move]:
    """Return moves that receive chunks in `out` if they would only be copied there from `tmp`.

    `moves` read or write the memory of `rank`, in an order in which they can run. The result has the same
    order, and messages have the same chunks in the same order.
    """
    places: dict[Part, Place] = {}
    dropped: set[Part] = set()
    for put, copy, place in _copied_once(moves, rank):
        places[put] = place
        dropped.add(copy)
    found: list[Move] = []
    for index, move in enumerate(moves):
        parts = [(index, chunk) for chunk in range(len(move.kinds))]
        if dropped.isdisjoint(parts) and places.keys().isdisjoint(parts):
            found.append(move)
        else:
            found += (_one(move, part[1], places.get(part)) for part in parts if part not in dropped)
    return found


def _copied_once(moves: Sequence[Move], rank: int) -> Iterator[tuple[Part, Part, Place]]:
    """Yield (put, copy, place in `out`) of chunks that this rank receives in `tmp` and only copies.

    The copy belongs to the round of the message, and no other move of that round uses the place.
    """
    uses = _uses(moves, rank)
    for slot, parts in uses.items():
        if slot.buffer != "tmp":
            continue
        for number in range(len(parts) - 1):
            (put, copy), after = parts[number : number + 2], parts[number + 2 : number + 3]
            first, second = moves[put[0]], moves[copy[0]]
            is_last_use = not after or _writes(moves[after[0][0]], slot, rank)
            if (first.op, second.op) != ("put", "copy") or first.round != second.round or not is_last_use:
                continue
            if not _writes(first, slot, rank) or _writes(second, slot, rank):
                continue
            buffer, chunk = second.target[1]
            place = Place(buffer, chunk + copy[1])
            others = (moves[index] for index, _ in uses[place] if index != copy[0])
            if buffer == "out" and all(each.round != first.round for each in others):
                yield put, copy, place


def _uses(moves: Sequence[Move], rank: int) -> dict[Place, list[Part]]:
    """Return, for each place of this rank, the parts of moves that read or write it, in order."""
    uses: dict[Place, list[Part]] = defaultdict(list)
    for index, move in enumerate(moves):
        for owner, (buffer, first) in (*move.sources, move.target):
            if owner == rank:
                for chunk in range(len(move.kinds)):
                    uses[Place(buffer, first + chunk)].append((index, chunk))
    return uses


def _writes(move: Move, place: Place, rank: int) -> bool:
    owner, (buffer, first) = move.target
    return owner == rank and buffer == place.buffer and 0 <= place.chunk - first < len(move.kinds)


def _one(move: Move, chunk: int, place: Place | None) -> Move:
    """Return the move of one chunk, with another target if `place` is given."""
    *sources, target = (
        (owner, Place(buffer, first + chunk)) for owner, (buffer, first) in (*move.sources, move.target)
    )
    if place is not None:
        target = target[0], place
    return move._replace(sources=tuple(sources), target=target, kinds=(move.kinds[chunk],))
