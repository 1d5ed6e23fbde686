"""Predicted times of collectives equal hand-computed values."""

import pytest
from round_machine import ROUND

from fairseq_tutel.parallel.links import all_gather_seconds, all_reduce_seconds, exchange_seconds
from fairseq_tutel.parallel.machine import PRESETS

A100 = PRESETS["a100"]


def test_a_linear_all_to_all_is_bounded_by_the_slower_kind_of_link():
    # 4 nodes of 2 ranks: 80 bytes for each of 8 ranks; 1 message within the node, 6 to other nodes.
    assert exchange_seconds(640, ROUND, 4, 2, "linear") == 0.5 + max(1 + 80 / 100, 60 + 480 / 10)
    one_node = exchange_seconds(640, ROUND, 1, 8, "linear")
    assert one_node == 0.5 + 7 * 1 + 560 / 100
    assert exchange_seconds(640, ROUND, 1, 1, "linear") == 0


def test_the_time_of_2dh_is_the_sum_of_both_hops_and_two_copies():
    within = 1 * 1 + 4 * 80 / 100
    across = 3 * 10 + 3 * 2 * 80 / 10
    gathers = 2 * 2 * 640 / 1000
    found = exchange_seconds(640, ROUND, 4, 2, "2dh")
    assert found == pytest.approx(2 * 0.5 + within + across + gathers)


def test_times_of_all_gather_and_all_reduce_equal_hand_computed_values():
    # A ring over 2 nodes of 2 ranks has 2 hops within nodes and 1 between nodes. The link of a node carries
    # the bytes of 2 ranks, half for each rank.
    gathered = all_gather_seconds(100, ROUND, 2, 2)
    assert gathered == 0.5 + 2 * 1 + 1 * 10 + max(300 / 100, 100 / 10)
    reduced = all_reduce_seconds(400, ROUND, 2, 2)
    assert reduced == 0.5 + 2 * 1 + 2 * 10 + max(2 * 300 / 100, 2 * 400 / 2 / 2 / 10)
    assert all_gather_seconds(100, ROUND, 1, 1) == all_reduce_seconds(1, ROUND, 1, 1) == 0
    assert all_gather_seconds(100, ROUND, 1, 2) == 0.5 + 1 + 1
