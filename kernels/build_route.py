"""The routing kernels as a layer launches them, for `build`: 128 experts, every type that is copied."""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from fairseq_tutel.kernels import triton_copy, triton_route

NUM_EXPERTS = 128


def route_variants() -> Iterator[tuple[str, Any, dict[str, str], tuple[str, ...], dict[str, Any]]]:
    """Yield (name, kernel, dtypes behind pointers, 32-bit integers, constants) of every kernel."""
    for dtype in ("fp32", "fp16", "bf16", "fp64"):
        yield from _gate_variants(dtype)
    for op, has_order in (("assign_slots", False), ("assign_slots_by", True)):
        yield from _slot_variants(op, has_order)
    for dtype in ("fp32", "fp16", "bf16", "fp64", "u8"):
        yield (
            f"stride_copy/{dtype}",
            triton_copy._stride_copy_kernel,
            {"rows_ptr": dtype, "out_ptr": dtype},
            ("outer", "inner", "size"),
            {"BLOCK": triton_copy.BLOCK},
        )


def _gate_variants(dtype: str) -> Iterator[tuple]:
    block_t, block_e = triton_route._tile(NUM_EXPERTS, dtype == "fp64")
    acc = tl.float64 if dtype == "fp64" else tl.float32
    tile = {"ACC": acc, "BLOCK_T": block_t, "BLOCK_E": block_e}
    sizes = ("num_tokens", "num_experts", "top_k")
    yield (
        f"softmax_top_k/{dtype}",
        triton_route._softmax_top_k_kernel,
        {"logits_ptr": dtype, "probs_ptr": dtype, "ids_ptr": "i64", "weights_ptr": dtype},
        sizes,
        tile,
    )
    yield (
        f"softmax_top_k_backward/{dtype}",
        triton_route._softmax_top_k_backward_kernel,
        {
            "probs_ptr": dtype,
            "ids_ptr": "i64",
            "dprobs_ptr": dtype,
            "dweights_ptr": dtype,
            "dlogits_ptr": dtype,
        },
        sizes,
        {"HAS_DPROBS": True, "HAS_DWEIGHTS": True, **tile},
    )


def _slot_variants(op: str, has_order: bool) -> Iterator[tuple]:
    sizes = ("num_blocks", "length", "num_experts", "time", "batch")
    constants = {"HAS_ORDER": has_order, "BLOCK": triton_route.BLOCK_N}
    yield (
        f"{op}/count",
        triton_route._count_kernel,
        {"ids_ptr": "i64", "order_ptr": "i64", "counts_ptr": "i32"},
        sizes,
        {**constants, "BLOCK_E": triton_route.COUNT_BLOCK_E},
    )
    yield (
        f"{op}/place",
        triton_route._place_kernel,
        {"ids_ptr": "i64", "order_ptr": "i64", "starts_ptr": "i32", "slots_ptr": "i64"},
        (*sizes, "num_tokens", "top_k"),
        {**constants, "PEERS": triton_route.PEERS},
    )
    if not has_order:
        yield (
            f"{op}/scan",
            triton_route._scan_kernel,
            {"counts_ptr": "i32", "totals_ptr": "i64"},
            ("chains", "num_blocks", "num_experts"),
            {"BLOCK_B": triton_route.SCAN_BLOCK_B, "BLOCK_E": triton_route.SCAN_BLOCK_E},
        )
