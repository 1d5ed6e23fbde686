"""Messages that arrive in `out`: chunks that would only be copied there from `tmp`."""

from fairseq_tutel.plans.executors.direct import received_directly
from fairseq_tutel.plans.executors.layout import walk
from fairseq_tutel.plans.format import Place
from fairseq_tutel.plans.generators import make


def received(plan, rank):
    """Return the places in which a rank receives chunks, and its copies as (source, target)."""
    moves = received_directly([move for move in walk(plan).moves if rank in move.ranks], rank)
    places = sorted(move.target[1] for move in moves if move.op == "put" and move.target[0] == rank)
    copies = sorted((move.sources[0][1], move.target[1]) for move in moves if move.op == "copy")
    return places, copies


def test_rows_arrive_in_out():
    places, copies = received(make("linear", "all_to_all", 4), 1)
    assert places == [Place("out", 0), Place("out", 2), Place("out", 3)]
    assert copies == [(Place("in", 1), Place("out", 1))]


def test_chunks_that_are_also_sent_on_arrive_in_tmp():
    places, copies = received(make("recursive_doubling", "all_gather", 4), 0)
    assert places == [Place("out", 2), Place("out", 3), Place("tmp", 1)]
    assert copies == [
        (Place("in", 0), Place("tmp", 0)),
        (Place("tmp", 0), Place("out", 0)),
        (Place("tmp", 1), Place("out", 1)),
    ]
