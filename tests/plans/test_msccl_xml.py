"""MSCCL files give correct plans, and plans that are written as MSCCL files are read back."""

from fractions import Fraction

import pytest
from test_generators import plans

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.format import Plan, PlanError
from fairseq_tutel.plans.generators import GENERATORS
from fairseq_tutel.plans.msccl.reader import from_xml
from fairseq_tutel.plans.msccl.writer import to_xml


def algorithm(coll: str, loop: int, gpus: list, **attributes) -> str:
    """Return XML text. In `gpus`, each block is (send, recv, steps), and a step is "type src dst [dep]"."""
    given = {"name": coll, "proto": "Simple", "inplace": 1} | attributes
    lines = [
        f'<algo nchunksperloop="{loop}" ngpus="{len(gpus)}" coll="{coll}" '
        + " ".join(f'{name}="{value}"' for name, value in given.items())
        + ">"
    ]
    for rank, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{rank}" i_chunks="{loop}" o_chunks="{loop}" s_chunks="{loop}">')
        for index, (send, recv, steps) in enumerate(blocks):
            lines.append(f'<tb id="{index}" send="{send}" recv="{recv}" chan="0">')
            for at, step in enumerate(steps):
                kind, src, dst, *after = step.split()
                block, before = after[0].split(".") if after else (-1, -1)
                lines.append(
                    f'<step s="{at}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" '
                    f'dstbuf="{dst[0]}" dstoff="{dst[1:]}" cnt="1" depid="{block}" deps="{before}"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def gathered() -> str:
    """Return an in-place MSCCL allgather, whose only buffer is the output."""
    gpus = []
    for r in range(3):
        before, after = (r - 1) % 3, (r + 1) % 3
        steps = [f"s o{r} o{r}", f"rcs o{before} o{before}", f"r o{after} o{after}"]
        gpus.append([(after, before, steps)])
    return algorithm("allgather", 3, gpus, name="allgather_ring", minBytes=3072, maxBytes=0)


GATHER = gathered()


def all_pairs(N: int = 3) -> str:
    """Return an in-place MSCCL allreduce, in which the first block of rank r sums chunk r of all ranks."""
    gpus = []
    for r in range(N):
        peers = [p for p in range(N) if p != r]
        blocks = []
        for index, p in enumerate(peers):
            steps = [f"s i{p} s{r}", f"r i{r} s{p}"]
            if index == 0:
                steps += [f"nop i0 i0 {other}.1" for other in range(1, N - 1)]
                steps += [f"re s{q} i{r}" for q in peers]
            last = 2 + (N - 2) + (N - 1) - 1
            steps += [f"s i{r} i{r}" + (f" 0.{last}" if index else ""), f"r i{p} i{p}"]
            blocks.append((p, p, steps))
        gpus.append(blocks)
    return algorithm("allreduce", N, gpus)


def ring(N: int = 4) -> str:
    """Return an out-of-place MSCCL allreduce, whose steps receive and send at the same time."""
    gpus = []
    for r in range(N):
        sums = [f"rrs i{(r - 1 - t) % N} o0" for t in range(1, N - 1)]
        passed = [f"rcs i0 o{(r - t) % N}" for t in range(1, N - 1)]
        steps = [f"s i{(r - 1) % N} o0", *sums, f"rrcs i{r} o{r}", *passed, f"r i0 o{(r + 1) % N}"]
        gpus.append([((r + 1) % N, (r - 1) % N, steps)])
    return algorithm("allreduce", N, gpus, inplace=0, outofplace=1)


def scattered() -> str:
    """Return an in-place MSCCL reduce_scatter with two dependent blocks."""
    gpus = [
        [(1, -1, ["s i1 i1"]), (-1, 1, ["r i0 s0"]), (-1, -1, ["re s0 i0 1.0"])],
        [(0, -1, ["s i0 i0"]), (-1, 0, ["r i1 s1"]), (-1, -1, ["re s1 o0 1.0"])],
    ]
    return algorithm("reduce_scatter", 2, gpus)


def exchanged() -> str:
    """Return an in-place MSCCL alltoall, in which received chunks overwrite sent chunks."""
    gpus = [[(1, 1, ["s i1 o0", "r i0 o1"])], [(0, -1, ["s i0 o1"]), (-1, 0, ["r i1 o0 0.0"])]]
    return algorithm("alltoall", 2, gpus)


def one_scratch() -> str:
    """Return an MSCCL allreduce in which rank 1 receives both chunks in one place of the scratch buffer."""
    both = ["s i0 s0", "s i1 s1"]
    gpus = [
        [(1, 1, [*both, "r i0 s0", "cpy i0 o0", "re s0 o0", "r i1 s1", "cpy i1 o1", "re s1 o1"])],
        [(0, 0, [*both, "r i0 s0", "cpy s0 o0", "re i0 o0", "r i1 s0", "cpy s0 o1", "re i1 o1"])],
    ]
    return algorithm("allreduce", 2, gpus, inplace=0)


@pytest.mark.parametrize(("text", "collective", "load"), [
    (GATHER, "all_gather", 2),
    (all_pairs(), "all_reduce", Fraction(4, 3)),
    (ring(), "all_reduce", Fraction(6, 4)),
    (scattered(), "reduce_scatter", Fraction(1, 2)),
    (one_scratch(), "all_reduce", 1),
], ids=["gather", "pairs", "ring", "scattered", "scratch"])  # fmt: skip
def test_msccl_files_give_correct_plans(text, collective, load):
    plan = from_xml(text)
    links = check(plan).bytes_of_link
    assert plan.collective == collective
    for rank in range(plan.ranks):
        assert sum(part for (source, _), part in links.items() if source == rank) == load


def test_the_name_and_the_byte_range_are_read_from_an_msccl_file():
    plan = from_xml(GATHER.encode())
    assert (plan.name, plan.min_bytes, plan.max_bytes) == ("allgather_ring", 1024, None)


def in_common(plan: Plan) -> tuple:
    """Return the properties that a plan and its MSCCL file share, such as sizes and messages."""
    sizes = (plan.collective, plan.ranks, plan.chunks, plan.min_bytes, plan.max_bytes)
    return *sizes, check(plan).bytes_of_link


@pytest.mark.parametrize("name", GENERATORS)
def test_plans_written_as_msccl_files_are_read_back(name):
    for plan in plans(name, counts=(2, 4)):
        assert in_common(from_xml(to_xml(plan))) == in_common(plan)


ENTITIES = "".join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(8))
BOMB = f'<!DOCTYPE algo [<!ENTITY a0 "aaaaaaaaaa">{ENTITIES}]><algo name="&a8;"'


@pytest.mark.parametrize(("before", "after", "sentence"), [
    ("<algo", BOMB, "limit on input amplification"),
    ("</algo>", "", "no element found"),
    ('coll="allgather"', 'coll="broadcast"', "coll is 'broadcast'; give one of allgather"),
    ('nchunksperloop="3"', 'nchunksperloop="4"', "nchunksperloop is 4; give a multiple of the 3 ranks"),
    ('send="1"', 'send="-1"', r"gpu 0, tb 0, step 0 \(s\) needs a peer"),
    ('dstbuf="o" dstoff="2"', 'dstbuf="o" dstoff="3"', "step 1 goes beyond the 3 chunks of dstbuf"),
    ('depid="-1" deps="-1"', 'depid="0" deps="0"', "step 0 depends on tb 0, step 0, which does not"),
    ('type="rcs"', 'type="r"', r"gpu 0 sends to gpu 1 on channel 0 messages of \[1\] chunks"),
])  # fmt: skip
def test_a_malformed_msccl_file_raises_an_error(before, after, sentence):
    with pytest.raises(PlanError, match=sentence):
        from_xml(GATHER.replace(before, after, 1))


@pytest.mark.parametrize(("text", "sentence"), [
    (exchanged(), "writes a chunk of a different length to out"),  # It would overwrite a sent chunk.
    (all_pairs().replace('inplace="1"', 'inplace="0"'), "writes to the buffer `in`, which is read-only"),
], ids=["in place", "out of place"])  # fmt: skip
def test_an_msccl_file_that_writes_to_a_forbidden_place_raises_an_error(text, sentence):
    with pytest.raises(PlanError, match=sentence):
        check(from_xml(text))
