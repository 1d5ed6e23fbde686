"""The static benchmark: loops in assembly, occupancy, traced launches, and its command."""

import json

import pytest

pytest.importorskip("triton")

# The out-of-line wait after EXIT jumps back into the loop.
SASS = """
.L_x_2:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10], R10
@!P0 BRA `(.L_x_1)
.L_x_3:
BAR.SYNC.DEFER_BLOCKING 0x0
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24
IADD3 R1, R1, 0x1, RZ
@!P1 BRA `(.L_x_2)
EXIT
.L_x_1:
@!P0 BRA `(.L_x_1)
BRA `(.L_x_3)
""".strip().splitlines()
GCN = """
.LBB0_1:
\ts_barrier
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
""".strip().splitlines()


def test_the_main_loop_has_its_instructions_alone():
    from benchmarks.static.loops import Loop, find_main_loop

    assert find_main_loop(SASS) == Loop(mma=1, other=4, barriers=1)
    assert find_main_loop(GCN) == Loop(mma=2, other=1, barriers=1)
    assert find_main_loop(SASS[:3]) is None


@pytest.mark.parametrize(
    "target, registers, shared, programs",
    [("sm_90", 128, 98_304, 2), ("sm_90", 129, 98_304, 1), ("sm_90", 90, 131_104, 1),
     ("gfx942", 128, 32_768, 2), ("gfx942", 130, 0, 1)],
)  # fmt: skip
def test_registers_and_shared_memory_limit_the_programs(target, registers, shared, programs):
    from benchmarks.static.kernels import PROCESSORS

    assert PROCESSORS[target].programs(registers, shared, warps=8) == programs


# Launches of forward, backward and decoding; fewer are better, so lower these numbers with them.
MOST = {("none", False): (11, 18, 10), ("gshard", False): (13, 20, 10), ("none", True): (11, 18, 10)}


@pytest.mark.parametrize("loss, bias", MOST)
def test_launches_and_host_reads_do_not_grow(loss, bias):
    from benchmarks.static import layers

    case = layers.CASES["qwen3_30b"]
    forward, backward = layers.trained(case, loss, bias)
    traces = forward, backward, layers.decoded(case)
    for trace, most in zip(traces, MOST[loss, bias], strict=True):
        assert 0 < len(trace.launches) <= most, trace.launches
        assert trace.reads == []
    assert layers.floor_bytes(case, "forward") <= forward.bytes <= 3_700_000_000
    assert layers.floor_bytes(case, "backward") <= backward.bytes <= 6_700_000_000


def test_the_command_writes_a_row_per_kernel(tmp_path, monkeypatch, capsys):
    from benchmarks.static import __main__ as static

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    path = tmp_path / "out.json"
    static.main(["--targets", "gfx942", "--only", "grouped_linear", "--json", str(path)])
    (row,) = json.loads(path.read_text())["kernels"]
    assert (row["kernel"], row["spilled"]) == ("grouped_linear/bf16/bias", 0)
    assert row["mma"] > 0 and row["programs"] > 0
    assert "grouped_linear/bf16/bias" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        static.main(["--targets", "sm_70"])
    assert "--targets has 'sm_70'; choose from sm_80" in capsys.readouterr().err


def test_a_launch_of_an_autotuned_kernel_of_another_project_is_a_variant(monkeypatch):
    import torch
    import triton

    from benchmarks.static import peers
    from fairseq_tutel.kernels.triton_dispatch import _gather_values_kernel as kernel

    tuned = triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2, num_stages=5)], key=[])(kernel)
    values, index = (torch.empty(9, dtype=dtype) for dtype in (torch.bfloat16, torch.int32))
    found = peers._variant(tuned, (values, index), {"read_ptr": values, "size": 9})
    pointers = {"values_ptr": "*bf16", "index_ptr": "*i32", "read_ptr": "*bf16"}
    assert found.signature == {**pointers, "size": "i32", "BLOCK": "constexpr"}
    assert (found.constants, found.name) == ({"BLOCK": 64}, "liger/bf16/gather_values_kernel")
    assert found.options == {"num_warps": 2, "num_stages": 5}
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert list(peers.rows(["sm_90"], "")) == []


def test_the_products_of_liger_kernel_compile(tmp_path, monkeypatch):
    pytest.importorskip("liger_kernel", reason="not run: needs liger-kernel")
    from benchmarks.static import peers

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
    (row,) = peers.rows(["sm_90"], "dW2")
    assert row["status"] == "ok" and row["mma"] > 0
