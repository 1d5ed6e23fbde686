"""Which tile sizes a product gets: some for every kind of GPU, small ones for small shapes, or a tuner's.

The sizes themselves are held by test_build, which compiles them.
"""

import pytest
import torch

from fairseq_tutel.kernels import tiles_config
from fairseq_tutel.kernels.tiles_config import HARDWARE, KINDS, PRECISIONS, candidates

LARGE = (65536, 8, 8192, 2048)


@pytest.mark.parametrize("hardware", (*HARDWARE, "interpreted"))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_product_has_candidates_that_a_kernel_takes(hardware, precision, kind):
    for shape in (LARGE, (0, 3, 1, 1), (1, 64, 48, 5), (1000, 6, 100, 2000)):
        found = candidates(kind, hardware, precision, *shape)
        assert 1 <= len(found) <= 4
        assert len(set(found)) == len(found)
        for config in found:
            for block in (config.block_m, config.block_n, config.block_k):
                assert block >= 16 and block & (block - 1) == 0


def test_an_expert_of_few_rows_gets_few():
    default = candidates("up", "hopper", "half", *LARGE)[0]
    few = candidates("up", "hopper", "half", 64 * 20, 64, 8192, 2048)[0]
    assert (default.block_m, few.block_m) == (128, 32)
    narrow = candidates("up", "hopper", "half", 65536, 8, 24, 40)[0]
    assert (narrow.block_n, narrow.block_k) == (32, 64)


def test_a_weight_gradient_is_cut_by_its_own_sides():
    config = candidates("weight", "hopper", "half", 64 * 20, 64, 24, 40)[0]
    assert (config.block_m, config.block_n) == (64, 32)


def test_the_tuner_chooses_where_there_is_one(monkeypatch):
    asked, launched = [], []

    def pick(kind, key, choices, launch):
        choices = choices()
        asked.append((kind, key, len(choices)))
        launch(choices[-1])
        return choices[-1]

    monkeypatch.setattr(tiles_config.autotune, "pick", pick)
    last = candidates("up", "hopper", "half", *LARGE)[-1]
    assert tiles_config.choose("up", "hopper", "half", LARGE, launched.append) == last
    assert asked == [("up", ("hopper", "half", *LARGE), 4)]
    assert launched == [last]


@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: a GPU is measured on")
def test_without_a_gpu_the_default_is_taken():
    chosen = tiles_config.choose("up", "hopper", "half", LARGE, lambda config: None)
    assert chosen == candidates("up", "hopper", "half", *LARGE)[0]


def test_every_tile_has_a_table_of_rows():
    triton_tiles = pytest.importorskip("fairseq_tutel.kernels.triton_tiles")
    rows = {
        config.block_m
        for hardware in (*HARDWARE, "interpreted")
        for precision in PRECISIONS
        for kind in set(KINDS) - {"weight"}
        for shape in (LARGE, (0, 3, 1, 1), (1000, 30, 48, 48), (300, 6, 48, 48))
        for config in candidates(kind, hardware, precision, *shape)
    }
    assert rows == set(triton_tiles.BLOCKS_M)


def test_candidates_are_built_once(monkeypatch):
    tiles_config._candidates.cache_clear()
    built = []
    monkeypatch.setattr(tiles_config, "_fit", lambda block, size: built.append(block) or block)
    for rows in (1000, 1024, 600):  # one bucket
        tiles_config.choose("up", "hopper", "half", (rows, 4, 96, 32), lambda config: None)
    assert len(built) == 3 * 4
    tiles_config._candidates.cache_clear()
