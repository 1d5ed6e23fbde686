"""Specialisations of kernels as an ahead-of-time compiler wants them described; of rows and routing.

Routing is launched for 128 experts; every type that is copied is there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from fairseq_tutel.kernels import (
    triton_balance,
    triton_dispatch,
    triton_place,
    triton_route,
)
from fairseq_tutel.kernels.tiles import Tile

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
    tile: Tile | None = None,
) -> Variant:
    """Return the variant of these arguments, in the kernel's own order.

    Args:
        name: "op/dtype/what else".
        kernel: a triton.jit function.
        pointers: dtype of what each points to.
        integers: names of the 32-bit integers.
        constants: arguments that are fixed at compile time; None for an absent one.
        tile: its warps and stages; None for Triton's defaults.
    """
    signature = {key: f"*{dtype.lstrip('*')}" for key, dtype in pointers.items()}
    signature |= dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
    return Variant(name, kernel, signature, constants, options)


def dispatch_variants() -> Iterator[Variant]:
    """Yield the gathers, with and without their optional argument."""
    for dtype in DTYPES:
        acc = ACCUMULATORS[dtype]
        # Gate weights are at least fp32 unless the gate itself is asked to run in half precision.
        weight = "*fp64" if dtype == "fp64" else "*fp32"
        for optional in (False, True):
            pointers = {"rows_ptr": dtype, "row_of_ptr": "i64", "y_ptr": dtype}
            pointers |= {"weights_ptr": weight} if optional else {}
            constants = {"ACC": acc, "BLOCK_D": 1024, **({} if optional else {"weights_ptr": None})}
            yield variant(
                f"gather_rows/{dtype}/{'scaled' if optional else 'plain'}",
                triton_dispatch._gather_sum_kernel,
                pointers,
                ("model_dim",),
                {"top_k": 1, "BLOCK_K": 1, **constants},
            )
            yield variant(
                f"gather_sum/{dtype}/{'weighted' if optional else 'plain'}",
                triton_dispatch._gather_sum_kernel,
                pointers,
                ("model_dim", "top_k"),
                {"BLOCK_K": 2, **constants},
            )
        yield variant(
            f"gather_dot/{dtype}",
            triton_dispatch._gather_dot_kernel,
            {"rows_ptr": dtype, "row_of_ptr": "i64", "y_ptr": dtype, "dots_ptr": dtype},
            ("model_dim", "top_k"),
            {"ACC": acc, "BLOCK_D": 1024},
        )
        yield variant(
            f"gather_values/{dtype}",
            triton_dispatch._gather_values_kernel,
            {"values_ptr": dtype, "index_ptr": "i64", "read_ptr": dtype},
            ("size",),
            {"BLOCK": triton_dispatch.BLOCK_VALUES},
        )


def route_variants() -> Iterator[Variant]:
    """Yield every kernel of the routing."""
    for dtype in DTYPES:
        yield from _gate_variants(dtype)
    yield from _row_variants(has_order=False)
    yield from _row_variants(has_order=True)
    for dtype in ("fp32", "fp64"):
        yield variant(
            f"load_loss/in_{dtype}",
            triton_balance._load_loss_kernel,
            {"load_ptr": "i64", "tokens_ptr": "i64"}
            | dict.fromkeys(("mass_ptr", "loss_ptr", "gradient_ptr"), dtype),
            ("num_experts",),
            {"ACC": ACCUMULATORS[dtype], "BLOCK_E": NUM_EXPERTS},
        )


def _gate_variants(dtype: str) -> Iterator[Variant]:
    """With several choices per token, whose weights are divided by their sum."""
    block_t, block_e = triton_route._tile(NUM_EXPERTS, dtype == "fp64")
    tile = {"ACC": ACCUMULATORS[dtype], "BLOCK_T": block_t, "BLOCK_E": block_e}
    constants = {"NORMALIZE": True, "TINY": 1e-38, **tile}
    sizes = ("num_tokens", "num_experts", "top_k")
    yield variant(
        f"softmax_top_k/{dtype}",
        triton_route._softmax_top_k_kernel,
        {"logits_ptr": dtype, "probs_ptr": dtype, "ids_ptr": "i64", "weights_ptr": dtype},
        sizes,
        {**constants, "BLOCK_K": 8},
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
        (*sizes, "dprobs_stride"),
        constants,
    )


def _row_variants(has_order: bool) -> Iterator[Variant]:
    """In token order without padding and limit, or in another order with both."""
    ids: dict[str, str] = {"ids": "i64"}
    absent: dict[str, Any] = {}
    if has_order:
        ids |= {"asked": "u8", "order": "i64"}
    else:
        absent = dict.fromkeys(("asked", "order"))
    by = "_by_order" if has_order else ""
    sizes = ("num_blocks", "length", "num_tokens", "top_k", "num_experts", "time", "batch")
    constants = {"BLOCK": triton_place.BLOCK_N, "BLOCK_E": triton_place.COUNT_BLOCK_E, **absent}
    yield variant(
        f"assign_rows/count{by}", triton_place._count_kernel, {**ids, "starts": "i32"}, sizes, constants
    )
    limit: dict[str, str] = {"limit": "i64"} if has_order else {}
    no_limit: dict[str, Any] = {} if has_order else {"limit": None}
    yield variant(
        f"assign_rows/scan{by}",
        triton_place._scan_kernel,
        {"starts": "i32", **dict.fromkeys(("assigned", "kept", "dropped"), "i64"), **limit},
        ("chains", "num_blocks", "num_experts"),
        {"BLOCK_B": triton_place.SCAN_BLOCK_B, "BLOCK_E": triton_place.SCAN_BLOCK_E, **no_limit},
    )
    results = ("kept", "slots_out", "row_of", "source_of", "token_of")
    yield variant(
        f"assign_rows/place{by}",
        triton_place._place_kernel,
        {**ids, "starts": "i32", **dict.fromkeys(results, "i64"), **limit},
        sizes,
        {**constants, "PEERS": triton_place.PEERS, **no_limit},
    )
