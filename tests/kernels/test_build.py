"""Kernels compiled ahead of time for GPUs that are not present, and the resources of the compiled code."""

import re

import pytest

from fairseq_tutel import kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

# Bytes that a program may have (sm_80: on consumer GPUs), and the instruction of a half-precision product.
TARGETS = {
    "sm_80": (99 * 1024, "mma.sync"),
    "sm_90": (227 * 1024, "wgmma"),
    "sm_100": (227 * 1024, "tcgen05.mma"),
    "sm_120": (99 * 1024, "mma.sync"),
    "gfx90a": (64 * 1024, "v_mfma"),
    "gfx942": (64 * 1024, "v_mfma"),
    "gfx950": (160 * 1024, "v_mfma"),
}
NEW = {"sm_100", "sm_120", "gfx950"}  # no machine of the project has them, so bf16 suffices
# On sm_90 in bf16: other instructions per MMA, barriers per step and programs per multiprocessor.
LIMITS = {
    "ffn_up/bf16/relu": (24, 4, 2),
    "ffn_up/bf16/swiglu": (17, 6, 1),
    "ffn_down_backward/bf16/relu": (24, 4, 2),
    "ffn_down_backward/bf16/swiglu": (24, 4, 1),
    "grouped_linear/bf16/bias": (22, 4, 2),
    "ffn_up_backward/bf16/glu": (22, 4, 2),
    "grouped_weight_grad/bf16/fc2": (46, 2, 2),
    "grouped_weight_grad/bf16/fc1": (46, 2, 2),
}
GEMMS = {"grouped_linear", "grouped_weight_grad", "ffn_up", "ffn_down_backward", "ffn_up_backward"}
# Types of 16 bits differ by a letter of an instruction, those of 64 bits are for the routing alone.
ALL_TYPES = {"fp32", "tf32", "tf32x3", "fp16", "bf16", "fp64"}


@pytest.mark.parametrize(
    "name, types",
    [
        ("sm_90", {"bf16"}),
        pytest.param("gfx942", {"fp32"}, marks=pytest.mark.long),
        *(
            pytest.param(name, {"bf16"} if name in NEW else ALL_TYPES, marks=pytest.mark.long)
            for name in TARGETS
        ),
    ],
)
def test_every_kernel_compiles_and_every_tile_of_the_table_fits(name, types, tmp_path, monkeypatch):
    from benchmarks.compile_table import build, products
    from benchmarks.static.kernels import PROCESSORS
    from benchmarks.static.loops import main_loop
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
        if op in GEMMS and precision not in ("fp32", "fp64"):
            assert instruction in code, variant.name
        if name == "sm_90" and variant.name in LIMITS:
            other, barriers, programs = LIMITS[variant.name]
            loop = main_loop(kernel)
            assert loop.ratio <= other and loop.barriers <= barriers, f"{variant.name}: {loop}"
            resident = PROCESSORS[name].programs(
                figures.registers, figures.shared, kernel.metadata.num_warps
            )
            assert resident >= programs, f"{variant.name}: {figures}"
        is_described = name in ("sm_90", "sm_100", "sm_120") and op in GEMMS - {"grouped_weight_grad"}
        assert bool(re.search(r"cp\.async\.bulk\.tensor", code)) == is_described, variant.name
    assert {op for op, *_ in names} == {*kernels.OPS, "row_tiles"}
    ups = {tuple(rest[:2]) for op, *rest in names if op == "ffn_up"}
    absent = {"fp64"} if name.startswith("sm") else {"fp64", "tf32", "tf32x3"}
    assert {precision for precision, _ in ups} == types - absent
    if name == products.ALL_ON and products.ALL_IN in types:
        assert {activation for _, activation in ups} == {*ACTIVATIONS, "swiglu"}
