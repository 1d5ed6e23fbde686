"""Compiles the grouped products of Liger-Kernel as its layer launches them, if it is installed.

`pip install --no-deps liger-kernel` installs it without a GPU. Its autotuner needs a GPU, so each kernel is
compiled with the configuration that Liger-Kernel uses without autotuning.
"""

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime import Autotuner

from benchmarks.compile_table.variants import Variant
from benchmarks.static.kernels import row, targets
from benchmarks.static.layers import CASES, DTYPE

CASE = CASES["qwen3_30b"]
TYPES = {torch.bfloat16: "*bf16", torch.int32: "*i32"}


def rows(names: Sequence[str], only: str) -> Iterator[dict[str, Any]]:
    """Compile Liger-Kernel's products whose name contains `only`; yield rows as `kernels.rows` does."""
    if find_spec("liger_kernel") is None:
        return
    found = [variant for variant in _variants() if only in variant.name]
    for name, target in targets().items():
        for variant in found if name in names else ():
            made = row(variant, name, target)
            if "mma" in made:  # the sum of a token's rows has none
                yield made


def _variants() -> list[Variant]:
    """Run Liger-Kernel's layer on meta tensors, and return the launches of its autotuned kernels."""
    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
    layer = import_module("liger_kernel.ops.fused_moe")
    found: dict[str, Variant] = {}

    def record(kernel: Any, *args: Any, **kwargs: Any) -> None:
        made = _variant(kernel, args, kwargs)
        found.setdefault(made.name, made)

    def meta(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype == DTYPE)

    case, copies = CASE, CASE.tokens * CASE.top_k
    maps = [meta(size, dtype=torch.int32) for size in (case.num_experts + 1, *(copies,) * 5)]
    with (
        mock.patch.object(Autotuner, "run", record),
        mock.patch.object(layer, "compute_routing_metadata", lambda *_: (None, *maps)),
    ):
        y = layer.LigerFusedMoEFunction.apply(
            meta(case.tokens, case.model_dim),
            meta(case.num_experts, 2 * case.hidden_dim, case.model_dim),
            meta(case.num_experts, case.model_dim, case.hidden_dim),
            meta(case.tokens, case.top_k, dtype=torch.int32),
            meta(case.tokens, case.top_k),
        )
        y.backward(torch.empty_like(y))
    return list(found.values())


def _variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
    """Return a launch of an autotuned kernel as a variant of its first configuration."""
    config: triton.Config = kernel.configs[0]
    given = {**dict(zip(kernel.fn.arg_names, args, strict=False)), **kwargs, **config.kwargs}
    constants = {p.name: given[p.name] for p in kernel.fn.params if p.is_constexpr}
    signature = {
        name: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        for name, value in given.items()
        if name in kernel.fn.arg_names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Variant(f"liger/bf16/{kernel.fn.__name__.strip('_')}", kernel.fn, signature, constants, options)
