"""Writes collective plans as XML files for MSCCL's runtime on GPUs. `reader` describes the format."""

import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from itertools import zip_longest
from typing import NamedTuple

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.format import Place, Plan, Step
from fairseq_tutel.plans.msccl.reader import BUFFERS, COLLECTIVES, Cell, cells_of

OWN = ("own", None)  # The thread block for copies and sums.
LETTERS = {ours: theirs for theirs, ours in BUFFERS.items()}
NAMES = {ours: theirs for theirs, ours in COLLECTIVES.items()}
NOP = {
    "type": "nop", "srcbuf": "i", "srcoff": "-1", "dstbuf": "o", "dstoff": "-1", "cnt": "0",
}  # fmt: skip
End = tuple[str, int | None]  # An end is the pair ("send" or "recv", channel number), or OWN.


class _Written(NamedTuple):
    """A step of an MSCCL file, with its block, its XML attributes, and the chunks it reads and writes."""

    block: End
    attributes: dict[str, str]
    reads: set[Cell]
    writes: set[Cell]


def to_xml(plan: Plan) -> str:
    """Return the XML text of an out-of-place MSCCL algorithm for a collective plan.

    A put becomes two MSCCL steps, a send in its place and a receive in the place of its wait. There is
    a thread block for each end of a channel, and one for copies and sums. A step depends on steps of other
    thread blocks that accessed its chunks before. Signals without puts are omitted, because MSCCL's
    receivers choose the position and time of a message. In contrast to this package, MSCCL rounds
    half-precision types after each addition.

    Raises:
        PlanError: the collective plan is wrong.
    """
    check(plan)
    scale = plan.ranks if plan.collective == "all_gather" else 1
    numbers = _channel_numbers(plan)
    algorithm = ET.Element("algo", _texts(
        name=plan.name, proto="Simple", nchannels=max(numbers, default=0) + 1,
        nchunksperloop=max(plan.in_chunks, plan.out_chunks), ngpus=plan.ranks,
        coll=NAMES[plan.collective], inplace=0, outofplace=1,
        minBytes=plan.min_bytes * scale, maxBytes=(plan.max_bytes or 0) * scale,
    ))  # fmt: skip
    for rank, steps in enumerate(_steps_of_ranks(plan)):
        gpu = ET.SubElement(algorithm, "gpu", _texts(
            id=rank, i_chunks=plan.in_chunks, o_chunks=plan.out_chunks, s_chunks=plan.temporary,
        ))  # fmt: skip
        _add_blocks(gpu, steps, plan, numbers)
    ET.indent(algorithm)
    return ET.tostring(algorithm, encoding="unicode")


def _texts(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _channel_numbers(plan: Plan) -> list[int]:
    """Return a number for each channel. Channels between the same two ranks get different numbers."""
    used: Counter[tuple[int, int]] = Counter()
    numbers = []
    for channel in plan.channels:
        numbers.append(used[channel.source, channel.target])
        used[channel.source, channel.target] += 1
    return numbers


def _steps_of_ranks(plan: Plan) -> list[list[_Written]]:
    """Return the MSCCL steps of each rank in a possible execution order."""
    order = Order(plan)
    arrived: dict[int, list[int]] = defaultdict(list)
    for put, wait in order.arrival.items():
        arrived[wait].append(put)
    written: list[list[_Written]] = [[] for _ in range(plan.ranks)]
    for number in order.run:
        step, steps = order.steps[number], written[order.sites[number][0]]
        if step.op == "put":
            steps.append(_leaf("s", ("send", step.channel), step, step.src[0]))
        for put in sorted(arrived[number]):
            sent = order.steps[put]
            steps.append(_leaf("r", ("recv", sent.channel), sent, sent.src[0]))
        if step.op in ("copy", "reduce"):
            first, *others = step.src
            if first != step.dst:
                steps.append(_leaf("cpy", OWN, step, first))
            steps += [_leaf("re", OWN, step, place) for place in others]
    return written


def _leaf(kind: str, block: End, step: Step, src: Place) -> _Written:
    assert step.dst is not None
    attributes = _texts(
        type=kind, srcbuf=LETTERS[src.buffer], srcoff=src.chunk,
        dstbuf=LETTERS[step.dst.buffer], dstoff=step.dst.chunk, cnt=step.n,
    )  # fmt: skip
    reads = set() if kind == "r" else cells_of(src, step.n)
    writes = set() if kind == "s" else cells_of(step.dst, step.n)
    return _Written(block, attributes, reads | writes if kind == "re" else reads, writes)


def _add_blocks(gpu: ET.Element, steps: list[_Written], plan: Plan, numbers: list[int]) -> None:
    """Add a rank's steps to the XML as thread blocks. A step depends on earlier accesses to its chunks."""
    blocks: dict[End, ET.Element] = {}
    known: dict[End, dict[str, int]] = defaultdict(dict)
    leaves: list[ET.Element] = []  # The XML element of each step.
    writer: dict[Cell, int] = {}
    readers: dict[Cell, set[int]] = defaultdict(set)
    for number, step in enumerate(steps):
        before = {writer[cell] for cell in step.reads | step.writes if cell in writer}
        before = before.union(*(readers[cell] for cell in step.writes))
        for cell in step.writes:
            writer[cell] = number
            readers[cell].clear()
        for cell in step.reads:
            readers[cell].add(number)
        if step.block not in blocks:
            blocks[step.block] = _new_block(gpu, step.block, plan, numbers)
        block, seen = blocks[step.block], known[step.block]
        needs: dict[str, int] = {}  # Maps a block to its last step that may not have ended.
        for other in sorted(before):
            block_id = blocks[steps[other].block].get("id", "")
            if block_id != block.get("id") and seen.get(block_id, -1) < other:
                needs[block_id] = seen[block_id] = other
        # An MSCCL step can depend on only one step, so nop steps wait for the other dependencies.
        kinds = [NOP] * (len(needs) - 1) + [step.attributes]
        for attributes, block_id in zip_longest(kinds, needs):
            leaf = _add_step(block, attributes, block_id, leaves[needs[block_id]] if needs else None)
        leaves.append(leaf)


def _new_block(gpu: ET.Element, end: End, plan: Plan, numbers: list[int]) -> ET.Element:
    name, index = end
    fields = {"id": len(gpu), "send": -1, "recv": -1, "chan": 0}
    if index is not None:
        channel = plan.channels[index]
        fields[name] = channel.target if name == "send" else channel.source
        fields["chan"] = numbers[index]
    return ET.SubElement(gpu, "tb", _texts(**fields))


def _add_step(
    block: ET.Element, attributes: dict[str, str], block_id: str | None, leaf: ET.Element | None
) -> ET.Element:
    """Add a step to a thread block. The step depends on step `leaf` of block `block_id`, if given."""
    deps = {"depid": "-1", "deps": "-1", "hasdep": "0"}
    if block_id is not None and leaf is not None:
        leaf.set("hasdep", "1")
        deps |= {"depid": block_id, "deps": leaf.get("s", "")}
    return ET.SubElement(block, "step", {"s": str(len(block)), **attributes, **deps})
