"""A chunk layout joins adjacent chunks, and a slot of `tmp` is as long as the longest chunk in the slot."""

from types import SimpleNamespace

from fairseq_tutel.plans.checker.data import Kind
from fairseq_tutel.plans.executors.layout import Layout, walk
from fairseq_tutel.plans.generators import make


def runs(walked, move):
    return Layout(walked, 10).runs(move.kinds, *move.sources, move.target)


def test_a_chunk_layout_joins_adjacent_chunks_to_one_run():
    walked = walk(make("ring", "all_gather", 4))
    assert all(len(runs(walked, move)) == 1 for move in walked.moves)
    two_hops = walk(make("two_hops", "all_to_all", 4, nodes=2))
    across = [move for move in two_hops.moves if len(move.kinds) == 2]
    assert across and all(len(runs(two_hops, move)) == 1 for move in across)


def test_a_slot_of_tmp_is_as_long_as_the_longest_chunk_that_it_holds():
    plan = SimpleNamespace(chunks=2)
    long, short = Kind(-1, -1, 0), Kind(-1, -1, 1)  # These chunks have 2 and 1 elements.
    slots = (frozenset({long, short}), frozenset({short}), frozenset())
    layout = Layout(SimpleNamespace(plan=plan, tmp_kinds=(slots,)), 3)
    assert layout.starts(0, "tmp") == [0, 2, 3, 3]
