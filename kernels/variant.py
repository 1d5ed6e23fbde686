"""One specialisation of a kernel, as an ahead-of-time compiler wants it described."""

from dataclasses import dataclass
from typing import Any

import triton.language as tl

from fairseq_tutel.kernels.tiles_config import Config

ACCUMULATORS = {
    "fp64": tl.float64,
    "fp32": tl.float32,
    "fp16": tl.float32,
    "bf16": tl.float32,
}

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
        """What is known of the arguments' values: the divisible ones, by position."""
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
        constants: what is fixed at compile time; None for an absent argument.
        config: its warps and stages; None for Triton's defaults.
    """
    signature = {key: f"*{dtype.lstrip('*')}" for key, dtype in pointers.items()}
    signature |= dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    options = {} if config is None else {"num_warps": config.warps, "num_stages": config.stages}
    return Variant(name, kernel, signature, constants, options)
