"""The tests check which tile each product uses, and test_build.py compiles the tiles."""

import pytest

from fairseq_tutel.kernels import tiles
from fairseq_tutel.kernels.tiles import HARDWARE, KINDS, PRECISIONS, choose, rows_of

LARGE = (65536, 8, 8192, 2048)
SHAPES = (LARGE, (0, 3, 1, 1), (1, 64, 48, 5), (1000, 6, 100, 2000))
COMBINATIONS = [
    (kind, hardware, precision)
    for kind in KINDS.split()
    for hardware in (*HARDWARE.split(), "interpreted")
    for precision in PRECISIONS.split()
    if hardware != "amd" or not precision.startswith("tf32")
]


def test_every_product_has_a_tile_for_every_shape():
    for combination in COMBINATIONS:
        rows = rows_of(*combination)
        assert rows[-1].where is None and all(row.where for row in rows[:-1])
        for shape in SHAPES:
            for block in choose(*combination, *shape)[:3]:
                assert block >= 16 and block & (block - 1) == 0


def test_every_row_of_the_tile_table_is_used():
    used = {id(row) for combination in COMBINATIONS for row in rows_of(*combination)}
    assert [row for row in tiles.TABLE if id(row) not in used] == []


def test_small_matrices_use_smaller_tiles():
    assert choose("up", "sm_90", "half", *LARGE).block_m == 128
    assert choose("up", "sm_90", "half", 64 * 20, 64, 8192, 2048).block_m == 32
    narrow = choose("up", "sm_90", "half", 65536, 8, 24, 40)
    assert (narrow.block_n, narrow.block_k) == (32, 64)
    weight = choose("weight", "sm_90", "half", 64 * 20, 64, 24, 40)
    assert (weight.block_m, weight.block_n) == (64, 32)


def test_blocks_m_has_the_height_of_every_tile():
    blocks_m = pytest.importorskip("fairseq_tutel.kernels.triton_tiles").BLOCKS_M
    found = {row.tile.block_m for row in tiles.TABLE if row.kinds != "weight"}
    assert {16, 32, *found} == set(blocks_m)
