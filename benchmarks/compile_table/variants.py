"""Specialisations of kernels as an ahead-of-time compiler wants them described; of rows, routing, plans.

Routing is launched for 128 experts; every type that is copied is there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl

from fairseq_tutel.kernels import triton_copy, triton_dispatch, triton_plan, triton_route
from fairseq_tutel.kernels.tiles_config import Config

DTYPES = ("fp32", "fp16", "bf16", "fp64")
NUM_EXPERTS = 128
ACCUMULATORS = {"fp64": tl.float64, "fp32": tl.float32, "fp16": tl.float32, "bf16": tl.float32}

# Bytes that pointers, and elements that dimensions and strides, are multiples of: as Triton itself would
# see them at a launch with the tensors of an ordinary model.
DIVISIBLE = 16
# The same in every call of a layer, but no multiple of anything. What differs from call to call, a kernel
# itself does not specialise on: another batch must not wait for a compiler.
UNEVEN = ("top_k", "num_experts")


@dataclass(frozen=True)
class Variant:
    """The types of a kernel's arguments, its compile-time constants and its launch options."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    @property
    def attributes(self) -> dict[tuple[int], list[tuple[str, int]]]:
        """Known properties of the arguments: the divisible ones, by position."""
        varying = (p.name for p in self.kernel.params if p.do_not_specialize)
        uneven = {*UNEVEN, *varying}
        return {
            (self.kernel.arg_names.index(name),): [("tt.divisibility", DIVISIBLE)]
            for name, kind in self.signature.items()
            if name not in uneven and (kind.startswith("*") or kind == "i32")
        }


def variant(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    integers: tuple[str, ...],
    constants: dict[str, Any],
    config: Config | None = None,
) -> Variant:
    """Return the variant of these arguments, in the kernel's own order.

    Args:
        name: "op/dtype/what else".
        kernel: a triton.jit function.
        pointers: dtype of what each points to.
        integers: names of the 32-bit integers.
        constants: arguments that are fixed at compile time; None for an absent one.
        config: its warps and stages; None for Triton's defaults.
    """
    signature = {key: f"*{dtype.lstrip('*')}" for key, dtype in pointers.items()}
    signature |= dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    options = {} if config is None else {"num_warps": config.warps, "num_stages": config.stages}
    return Variant(name, kernel, signature, constants, options)


def dispatch_variants() -> Iterator[Variant]:
    """Yield the gathers, with and without their optional argument."""
    for dtype in DTYPES:
        acc = ACCUMULATORS[dtype]
        # Gate weights are at least fp32 unless the gate itself is asked to run in half precision.
        weight = "*fp64" if dtype == "fp64" else "*fp32"
        for optional in (False, True):
            yield variant(
                f"gather_rows/{dtype}/{'scaled' if optional else 'plain'}",
                triton_dispatch._gather_rows_kernel,
                {"x_ptr": dtype, "index_ptr": "i64", "scale_ptr": weight, "rows_ptr": dtype},
                ("model_dim",),
                {"HAS_SCALE": optional, "ACC": acc, "BLOCK_D": 1024},
            )
            yield variant(
                f"gather_sum/{dtype}/{'weighted' if optional else 'plain'}",
                triton_dispatch._gather_sum_kernel,
                {"rows_ptr": dtype, "row_of_ptr": "i64", "weights_ptr": weight, "y_ptr": dtype},
                ("model_dim", "top_k"),
                {"HAS_WEIGHTS": optional, "ACC": acc, "BLOCK_K": 2, "BLOCK_D": 1024},
            )
        yield variant(
            f"gather_dot/{dtype}",
            triton_dispatch._gather_dot_kernel,
            {"rows_ptr": dtype, "row_of_ptr": "i64", "y_ptr": dtype, "dots_ptr": dtype},
            ("model_dim", "top_k"),
            {"ACC": acc, "BLOCK_D": 1024},
        )


def route_variants() -> Iterator[Variant]:
    """Yield every kernel of the routing."""
    for dtype in DTYPES:
        yield from _gate_variants(dtype)
    for op, has_order in (("assign_slots", False), ("assign_slots_by", True)):
        yield from _slot_variants(op, has_order)
    for dtype in (*DTYPES, "u8"):
        yield variant(
            f"stride_copy/{dtype}",
            triton_copy._stride_copy_kernel,
            {"rows_ptr": dtype, "out_ptr": dtype},
            ("outer", "inner", "size"),
            {"BLOCK": triton_copy.BLOCK},
        )


def _gate_variants(dtype: str) -> Iterator[Variant]:
    block_t, block_e = triton_route._tile(NUM_EXPERTS, dtype == "fp64")
    tile = {"ACC": ACCUMULATORS[dtype], "BLOCK_T": block_t, "BLOCK_E": block_e}
    sizes = ("num_tokens", "num_experts", "top_k")
    yield variant(
        f"softmax_top_k/{dtype}",
        triton_route._softmax_top_k_kernel,
        {"logits_ptr": dtype, "probs_ptr": dtype, "ids_ptr": "i64", "weights_ptr": dtype},
        sizes,
        tile,
    )
    yield variant(
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


def _slot_variants(op: str, has_order: bool) -> Iterator[Variant]:
    sizes = ("num_blocks", "length", "num_experts", "time", "batch")
    constants = {"HAS_ORDER": has_order, "BLOCK": triton_route.BLOCK_N}
    yield variant(
        f"{op}/count",
        triton_route._count_kernel,
        {"ids_ptr": "i64", "order_ptr": "i64", "counts_ptr": "i32"},
        sizes,
        {**constants, "BLOCK_E": triton_route.COUNT_BLOCK_E},
    )
    yield variant(
        f"{op}/place",
        triton_route._place_kernel,
        {"ids_ptr": "i64", "order_ptr": "i64", "starts_ptr": "i32", "slots_ptr": "i64"},
        (*sizes, "num_tokens", "top_k"),
        {**constants, "PEERS": triton_route.PEERS},
    )
    if not has_order:
        yield variant(
            f"{op}/scan",
            triton_route._scan_kernel,
            {"counts_ptr": "i32", "totals_ptr": "i64"},
            ("chains", "num_blocks", "num_experts"),
            {"BLOCK_B": triton_route.SCAN_BLOCK_B, "BLOCK_E": triton_route.SCAN_BLOCK_E},
        )


def plan_variants() -> Iterator[Variant]:
    """Yield what takes a plan's steps on one GPU."""
    for dtype in DTYPES:
        plan = variant(
            f"run_plan/{dtype}",
            triton_plan._plan_kernel,
            {"memory": dtype, **dict.fromkeys(triton_plan.TABLES, "i32")},
            triton_plan.NUMBERS,
            {"IN_FP32": dtype in ("fp16", "bf16"), **triton_plan.CONSTANTS},
        )
        yield replace(plan, options=triton_plan.OPTIONS)
