"""Ranks that were started differently are all told the same sentence before any collective."""

from datetime import timedelta

import mortal
import pytest
import torch.distributed as dist

from fairseq_tutel.parallel import agreement, guard
from fairseq_tutel.parallel.agreement import agree
from fairseq_tutel.parallel.groups import make_topology

FIX = "; start all ranks with the same command, packages and data."


def _told(facts_by_rank):
    """Return what the ranks are told of these facts, by rank, and whether they agree afterwards."""
    try:
        agree(facts_by_rank[dist.get_rank()])
        told = "agreed"
    except ValueError as error:
        told = str(error)
    agree({"after": "that"})
    return told


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ([{"--a": 1, "--b": [2, "x"]}] * 4, "agreed"),
        ([{"--k": 2}, {"--k": 2}, {"--k": 1}, {"--k": 2}], "--k is 2 on ranks 0-1, 3 and 1 on rank 2"),
        ([{"--k": 1}, *[{"--k": 2}] * 3], "--k is 1 on rank 0 and 2 on ranks 1-3"),
        ([{"--k": k} for k in "abca"], "--k is a on ranks 0, 3 and b on rank 1 and c on rank 2"),
        ([{"--k": 1, "n": ""}, *[{"--k": 1}] * 3], 'n is "" on rank 0 and missing on ranks 1-3'),
        (
            [{f"--{n}": 0 for n in "edcba"}, *[{f"--{n}": 1 for n in "abcde"}] * 3],
            ", ".join(f"--{n} is 0 on rank 0 and 1 on ranks 1-3" for n in "abc") + " (2 more differ)",
        ),
        (
            [{"--k": "y" * 500}, *[{"--k": "x"}] * 3],
            f"--k is {'y' * 80}… on rank 0 and x on ranks 1-3",
        ),
        (
            [{"--k": "y" * 500 + "a"}, *[{"--k": "y" * 500 + "b"}] * 3],
            f"--k is …{'y' * 20}a on rank 0 and …{'y' * 20}b on ranks 1-3",
        ),
    ],
    ids=["alike", "odd", "first odd", "three", "lacking", "many", "long", "long alike"],
)  # fmt: skip
def test_all_ranks_hear_the_same_sentence(ranks, facts, sentence):
    expected = sentence if sentence == "agreed" else sentence + FIX
    assert ranks(4).run(_told, facts) == [expected] * 4


def _compare(rank, fate, victim):
    guard.set_timeout(2)
    if rank == victim:
        fate()
    agree({"--k": rank})


@pytest.mark.parametrize("fate", [mortal.die, mortal.stop])
def test_a_rank_that_does_not_come_is_named(fate):
    said, seconds = mortal.run(_compare, 3, [0, 2], fate, 1)
    for sentence in said:
        assert sentence.startswith(
            "CommunicationError: rank 1 did not reach the comparison of all ranks' options within 2 s; "
            "look at the log of rank 1, or raise --moe-comm-timeout"
        )
    assert seconds < 10


def test_a_first_rank_that_ends_is_named():
    (sentence,), seconds = mortal.run(_compare, 2, [1], mortal.die, 0)
    assert "rank 1 could not finish the comparison of all ranks' options" in sentence
    assert "rank 0, which runs the rendezvous store" in sentence
    assert seconds < 10


def _make(arguments_by_rank):
    try:
        made = make_topology(*arguments_by_rank[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return made.expert_parallel_size


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (([4], 1), "--moe-expert-parallel-size is 2 on ranks 0, 2-3 and 1 on rank 1"),
        (([4], 3), "--moe-expert-parallel-size is 2 on ranks 0, 2-3 and 3 on rank 1"),
        (([4, 4], 2), "the number of experts of each layer is [4] on ranks 0, 2-3 and [4, 4] on rank 1"),
        (([4], 2, 2), "the number of ranks of a node is 0 on ranks 0, 2-3 and 2 on rank 1"),
    ],
    ids=["another size", "a bad size", "other layers", "nodes"],
)  # fmt: skip
def test_a_topology_of_different_arguments_is_refused_before_any_group(ranks, odd, sentence):
    ranks(4).close()  # what was once found alike is not compared again
    usual = ([4], 2)
    assert ranks(4).run(_make, [usual, odd, usual, usual]) == [sentence + FIX] * 4
    assert ranks(4).run(_make, [usual] * 4) == [2] * 4
    ranks(4).close()


def test_alone_there_is_nothing_to_compare():
    agree({"--k": 1})


def test_a_thousand_ranks(monkeypatch):
    store, prefix = dist.HashStore(), "here"
    monkeypatch.setattr(dist, "get_world_size", lambda: 1000)
    for rank in range(1000):
        if rank != 500:
            store.set(f"{prefix}/digest/{rank}", "same" if rank else "odd")
    late, sentence = agreement._compare(store, prefix, timedelta(seconds=0.2))
    assert late == [500] and "rank 500 did not reach" in sentence
    store.set(f"{prefix}/digest/500", "same")
    store.set(f"{prefix}/facts/0", '{"--k": 1}')
    store.set(f"{prefix}/facts/1", '{"--k": 2}')  # of those alike, one is read
    late, sentence = agreement._compare(store, prefix, timedelta(seconds=0.2))
    assert (late, sentence) == ([], "--k is 1 on rank 0 and 2 on ranks 1-999" + FIX)
