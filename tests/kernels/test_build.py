"""Kernels compiled ahead of time for GPUs that are not here, and what the compiled code needs.

Covered: every op, precision and kind of target; default tiles spill nothing and fit into shared memory;
tensor cores and descriptors where they are meant; the table that prints it.
Together about 90 seconds on one core.
"""

import re

import pytest

from fairseq_tutel import kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

# Bytes that a program may have, and the instruction that a product of half precision is made of.
TARGETS = {
    "sm_80": (163 * 1024, "mma.sync"),
    "sm_90": (227 * 1024, "wgmma"),
    "gfx90a": (64 * 1024, "v_mfma"),
    "gfx942": (64 * 1024, "v_mfma"),
}
GEMMS = {
    "grouped_linear",
    "grouped_weight_grad",
    "ffn_up",
    "ffn_down_backward",
    "ffn_up_backward",
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_compiles_and_the_default_tiles_fit(name, tmp_path, monkeypatch):
    from fairseq_tutel.kernels import build, build_gemm
    from fairseq_tutel.kernels.activations import ACTIVATIONS

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else an earlier run's result would do
    target = next(t for t in build.TARGETS if build.name_of(t) == name)
    compiled = build.build_all([target])
    ops = {variant.split("/")[0] for variant, _ in compiled}
    assert ops == {*kernels.OPS, "tile_table"}
    shared, instruction = TARGETS[name]
    for (variant, _), kernel in compiled.items():
        op, precision, *_ = variant.split("/")
        figures = build.figures(kernel)
        assert figures.registers > 0
        assert figures.spilled == 0, f"{variant}: {figures}"
        assert figures.shared <= shared, f"{variant}: {figures}"
        code = kernel.asm["ptx" if name.startswith("sm") else "amdgcn"]
        if op in GEMMS and precision in ("fp16", "bf16", "tf32"):
            assert instruction in code, variant
        is_described = name == "sm_90" and op in GEMMS - {"grouped_weight_grad"}
        assert bool(re.search(r"cp\.async\.bulk\.tensor", code)) == is_described, variant
    ups = {
        tuple(variant.split("/")[1:]) for variant, _ in compiled if variant.startswith("ffn_up/")
    }
    assert {"fp32", "fp16", "bf16"} <= {precision for precision, _ in ups}
    if name == build_gemm.ALL_ON:
        assert {activation for _, activation in ups} == {*ACTIVATIONS, "swiglu"}


def test_the_table_has_a_row_per_kernel(tmp_path, capsys):
    from benchmarks import compile_table

    path = tmp_path / "table.md"
    compile_table.main(["--target", "gfx942", "--only", "tile_table", "--markdown", str(path)])
    assert re.search(r"tile_table/i64 +gfx942 +\d+ +\d+ +0 +\d+", capsys.readouterr().out)
    assert re.search(r"\| tile_table/i64 +\| gfx942 +\| +\d+ \|", path.read_text())
