"""Kernels compiled ahead of time for GPUs that are not present, and the resources of the compiled code."""

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
GEMMS = {"grouped_linear", "grouped_weight_grad", "ffn_up", "ffn_down_backward", "ffn_up_backward"}
# Types of 16 bits differ by a letter of an instruction, those of 64 bits are for the routing alone.
ALL_TYPES = {"fp32", "tf32", "fp16", "bf16", "fp64"}


@pytest.mark.parametrize(
    "name, types",
    [
        ("sm_90", {"bf16"}),
        pytest.param("gfx942", {"fp32"}, marks=pytest.mark.long),
        *(pytest.param(name, ALL_TYPES, marks=pytest.mark.long) for name in TARGETS),
    ],
)
def test_every_kernel_compiles_and_the_default_tiles_fit(name, types, tmp_path, monkeypatch):
    from benchmarks.compile_table import build, products
    from fairseq_tutel.kernels.activations import ACTIVATIONS

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else an earlier run's result would do
    target = next(t for t in build.TARGETS if build.name_of(t) == name)
    shared, instruction = TARGETS[name]
    names = set()
    for variant in build.variants(target):
        op, precision, *rest = variant.name.split("/")
        if precision in ALL_TYPES - types:
            continue
        names.add((op, precision, *rest))
        kernel = build.build(variant, target)
        figures = build.figures(kernel)
        assert figures.registers > 0
        assert figures.spilled == 0, f"{variant.name}: {figures}"
        assert figures.shared <= shared, f"{variant.name}: {figures}"
        code = kernel.asm["ptx" if name.startswith("sm") else "amdgcn"]
        if op in GEMMS and precision in ("fp16", "bf16", "tf32"):
            assert instruction in code, variant.name
        if op == "run_plan":  # the order of a signal, and of a wait
            for order in ("release", "acquire"):
                assert re.search(rf'(gpu\.|"agent"\) ){order}', kernel.asm["llir"]), variant.name
        is_described = name == "sm_90" and op in GEMMS - {"grouped_weight_grad"}
        assert bool(re.search(r"cp\.async\.bulk\.tensor", code)) == is_described, variant.name
    assert {op for op, *_ in names} == {*kernels.OPS, "run_plan", "tile_table"}
    ups = {tuple(rest) for op, *rest in names if op == "ffn_up"}
    absent = {"fp64"} if name.startswith("sm") else {"fp64", "tf32"}
    assert {precision for precision, _ in ups} == types - absent
    if name == products.ALL_ON and products.ALL_IN in types:
        assert {activation for _, activation in ups} == {*ACTIVATIONS, "swiglu"}


def test_the_table_has_a_row_per_kernel(tmp_path, capsys):
    from benchmarks.compile_table import __main__ as compile_table

    path = tmp_path / "table.md"
    compile_table.main(["--target", "gfx942", "--only", "tile_table", "--markdown", str(path)])
    assert re.search(r"tile_table/i64 +gfx942 +\d+ +\d+ +0 +\d+", capsys.readouterr().out)
    assert re.search(r"\| tile_table/i64 +\| gfx942 +\| +\d+ \|", path.read_text())
