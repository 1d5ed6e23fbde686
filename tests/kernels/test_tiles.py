"""Which tile a product gets. The tiles themselves are checked by test_build, which compiles them."""

import contextlib
import io

import pytest
import torch

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


def test_every_row_of_the_table_is_used():
    used = {id(row) for combination in COMBINATIONS for row in rows_of(*combination)}
    assert [row for row in tiles.TABLE if id(row) not in used] == []


# Rows of all experts, experts, D and H of the layers that were measured on an H100.
A, C, E = (32768, 8, 1024, 4096), (16384, 8, 4096, 14336), (262144, 128, 2048, 768)


@pytest.mark.parametrize(
    "kind, layer, n, k, tile",
    [
        ("linear", A, "D", "H", (256, 128, 64, 8, 4)),
        ("linear", C, "D", "H", (256, 128, 64, 8, 3)),
        ("linear", E, "D", "H", (128, 128, 64, 8, 3)),
        ("relu_up", A, "H", "D", (128, 256, 64, 8, 3)),
        ("glu_up", C, "H", "D", (128, 128, 64, 8, 3)),
        ("glu_up", E, "H", "D", (128, 128, 64, 8, 3)),
        ("dx", A, "D", "H", (128, 256, 64, 8, 3)),
        ("glu_dx", C, "D", "H", (128, 256, 64, 8, 3)),
        ("glu_dx", E, "D", "H", (128, 256, 64, 8, 3)),
        ("relu_hidden", A, "H", "D", (128, 256, 64, 8, 3)),
        ("glu_hidden", C, "H", "D", (128, 128, 64, 8, 4)),
        ("glu_hidden", E, "H", "D", (128, 128, 64, 8, 4)),
        ("weight", A, "H", "D", (256, 128, 64, 8, 3)),
        ("weight", A, "D", "H", (128, 128, 64, 8, 3)),
        ("weight", C, "H", "D", (256, 128, 64, 8, 3)),
        ("weight", C, "D", "H", (128, 128, 64, 8, 3)),
        ("weight", E, "H", "D", (128, 128, 64, 8, 3)),
        ("weight", E, "D", "H", (128, 128, 64, 8, 3)),
    ],
)
def test_measured_shapes_get_their_measured_tiles(kind, layer, n, k, tile):
    rows, experts, model_dim, hidden_dim = layer
    sizes = {"D": model_dim, "H": hidden_dim}
    assert choose(kind, "sm_90", "half", rows, experts, sizes[n], sizes[k])[:5] == tile


def test_a_tile_is_no_larger_than_the_matrices():
    assert choose("up", "sm_90", "half", *LARGE).block_m == 128
    assert choose("up", "sm_90", "half", 64 * 20, 64, 8192, 2048).block_m == 32
    narrow = choose("up", "sm_90", "half", 65536, 8, 24, 40)
    assert (narrow.block_n, narrow.block_k) == (32, 64)
    weight = choose("weight", "sm_90", "half", 64 * 20, 64, 24, 40)
    assert (weight.block_m, weight.block_n) == (64, 32)


def test_every_tile_has_a_table_of_row_tiles():
    blocks_m = pytest.importorskip("fairseq_tutel.kernels.triton_tiles").BLOCKS_M
    found = {row.tile.block_m for row in tiles.TABLE if row.kinds != "weight"}
    assert {16, 32, *found} == set(blocks_m)


@pytest.mark.parametrize(
    "major, hardware",
    [(7, "sm_80"), (8, "sm_80"), (9, "sm_90"), (10, "sm_100"), (12, "sm_120"), (13, "sm_120")],
)
def test_the_hardware_class_is_that_of_the_compute_capability(major, hardware):
    launch = pytest.importorskip("fairseq_tutel.kernels.triton_launch")
    assert launch.hardware_class(major) == hardware


def measured() -> list[str]:
    from benchmarks.tiles import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["--quick"]) == 0
    return [line for line in printed.getvalue().splitlines() if line.startswith("Row")]


def test_the_benchmark_prints_a_row_for_every_product(interpreter):
    (lines,) = interpreter.run(measured)
    rows = [eval(line, vars(tiles))[0] for line in lines]  # each ends with a comma
    kinds = ["relu_up", "linear", "relu_hidden", "dx", "weight", "weight"]
    assert [row.kinds for row in rows] == kinds and all(row.hardware == "interpreted" for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: a GPU is there")
def test_the_benchmark_needs_a_gpu(capsys):
    from benchmarks.tiles import main

    with pytest.raises(SystemExit, match="2"):
        main([])
    assert capsys.readouterr().err.count("needs a GPU") == 1
