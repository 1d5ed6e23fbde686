"""Times of collectives by hand."""

from itertools import pairwise

import pytest
from round_machine import ROUND

from fairseq_tutel.parallel.links import all_gather_seconds, all_reduce_seconds, exchange_seconds
from fairseq_tutel.parallel.machine import PRESETS

A100 = PRESETS["a100"]


def test_a_linear_all_to_all_is_bounded_by_the_slower_kind_of_link():
    # 4 nodes of 2: 80 bytes for each of 8 ranks; 1 message within the node, 6 across.
    assert exchange_seconds(640, ROUND, 4, 2, "linear") == 0.5 + max(1 + 80 / 100, 60 + 480 / 10)
    one_node = exchange_seconds(640, ROUND, 1, 8, "linear")
    assert one_node == 0.5 + 7 * 1 + 560 / 100
    assert exchange_seconds(640, ROUND, 1, 1, "linear") == 0


def test_2dh_is_one_leg_after_the_other_and_two_gathers():
    within = 1 * 1 + 4 * 80 / 100
    across = 3 * 10 + 3 * 2 * 80 / 10
    gathers = 2 * 2 * 640 / 1000
    found = exchange_seconds(640, ROUND, 4, 2, "2dh")
    assert found == pytest.approx(2 * 0.5 + within + across + gathers)


def test_2dh_loses_on_small_clusters_and_wins_on_large_ones_with_small_messages():
    def ratio(gpus, mebibytes):
        size = mebibytes * 2**20
        linear, hierarchical = (exchange_seconds(size, A100, gpus // 8, 8, a) for a in ("linear", "2dh"))
        return linear / hierarchical

    for size in (1 / 16, 1, 32, 256):
        assert ratio(16, size) < 1
        ratios = [ratio(8 * nodes, size) for nodes in (2, 8, 32, 128, 512, 2048)]
        assert all(after > before for before, after in pairwise(ratios))
        assert ratios[-1] > 1.5
    assert ratio(128, 32) < 1 < ratio(256, 32)  # what the alpha of the presets was set by
    # Messages shrink from W - L to N - 1, so no message size gains more than L.
    assert 7 < ratio(16384, 1 / 1024) < 8


def test_gathers_and_all_reduces_by_hand():
    # 2 nodes of 2 in a ring: 2 hops within, 1 across; each node's link brings 2 ranks' bytes, by halves.
    gathered = all_gather_seconds(100, ROUND, 2, 2)
    assert gathered == 0.5 + 2 * 1 + 1 * 10 + max(300 / 100, 100 / 10)
    reduced = all_reduce_seconds(400, ROUND, 2, 2)
    assert reduced == 0.5 + 2 * 1 + 2 * 10 + max(2 * 300 / 100, 2 * 400 / 2 / 2 / 10)
    assert all_gather_seconds(100, ROUND, 1, 1) == all_reduce_seconds(1, ROUND, 1, 1) == 0
    assert all_gather_seconds(100, ROUND, 1, 2) == 0.5 + 1 + 1
