"""`python -m benchmarks.host`: measure the host's time for one MoE layer on a GPU; print JSON lines.

The fastest time is divided by the fastest time of two nn.Linear and a ReLU in the same process. Without
a GPU, Triton compiles for sm_90, a fake driver launches nothing, and small CPU tensors have meaningless
values: packing of arguments and descriptors, launches and the GPU allocator are excluded.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

import fairseq_tutel as ft
from benchmarks import compiled
from benchmarks.layer_cases import CUDA_CASES, Case
from fairseq_tutel import kernels
from fairseq_tutel.kernels import gate_product, triton_launch, triton_ops
from fairseq_tutel.moe.metrics import count_routing

# `defaults` has fairseq's default options and metrics; `S` has the options of the other benchmarks.
PLAIN = {"top_k": 1, "balance_loss": "none", "expert_bias": False}
CASES: dict[str, dict[str, Any]] = {"defaults": {"top_k": 2}, "S": PLAIN}
FIELDS = ["forward", "forward_backward", "launches", "launches_forward", "torch_ops", "python_calls"]
WARM, ROUNDS = 30, 300


def main(words: list[str] | None = None) -> int:
    """Measure the host's time, and print a line for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host")
    parser.add_argument("--quick", action="store_true", help="two rounds, as a smoke test")
    rounds = 2 if parser.parse_args(words).quick else ROUNDS
    for name in CASES:
        print(json.dumps({"case": name, **_line(name, rounds)}), flush=True)
    return 0


def _line(name: str, rounds: int) -> dict[str, Any]:
    on_gpu, case = torch.cuda.is_available(), CUDA_CASES["S"]
    launches = []
    for with_backward in (False, True):
        run, _ = _steps(name, torch.device("meta"), case)
        with compiled.recorded() as trace:
            run(with_backward)
        launches.append(len(trace.names))
    with ExitStack() as stack:
        # Backward runs in this thread, because waking another thread costs time.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if not on_gpu:
            _without_gpu(stack)
            case = replace(case, tokens=16, model_dim=32, hidden_dim=32)
        layer, dense = _steps(name, torch.device("cuda" if on_gpu else "cpu"), case)
        ratios = [_ratio(layer, dense, each, rounds, on_gpu) for each in (False, True)]
        counts = _counted(lambda: layer(True))
    return dict(zip(FIELDS, (*ratios, *launches[::-1], *counts), strict=True))


def _steps(name: str, device: torch.device, case: Case) -> list[Callable[[bool], None]]:
    """Return functions that run the MoE layer and the dense layer, with or without backward."""
    sizes = case.model_dim, case.hidden_dim
    config = ft.MoEConfig(*sizes, case.num_experts, **CASES[name])
    layer = ft.MoELayer(config, seed=1).to(device, torch.bfloat16)
    with device:
        maps = nn.Linear(*sizes, config.expert_bias), nn.Linear(*sizes[::-1], config.expert_bias)
        dense = nn.Sequential(maps[0], nn.ReLU(), maps[1]).bfloat16()
        x_TD = torch.randn(case.tokens, case.model_dim, dtype=torch.bfloat16, requires_grad=True)
        dy_TD = torch.ones_like(x_TD)
    parameters = [x_TD, *layer.parameters(), *dense.parameters()]

    def run_layer() -> list[Any]:
        y_TD, output = layer(x_TD)
        if config.balance_loss == "none":
            return [y_TD]
        count_routing(output.routing)
        return [y_TD, output.balance_loss]

    def run(forward: Callable[[], list[Any]], with_backward: bool) -> None:
        ends = forward()
        if with_backward:
            torch.autograd.backward(ends, [dy_TD, None][: len(ends)])
            for parameter in parameters:
                parameter.grad = None

    return [functools.partial(run, run_layer), functools.partial(run, lambda: [dense(x_TD)])]


def _ratio(ours: Any, base: Any, with_backward: bool, rounds: int, on_gpu: bool) -> float:
    """Run two functions alternately; return the fastest time of the first divided by that of the second."""
    times: tuple[list[float], list[float]] = [], []
    for number in range(WARM + rounds):
        for function, seconds in zip((ours, base), times, strict=True):
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            function(with_backward)
            if number >= WARM:
                seconds.append(time.perf_counter() - begin)
    return round(min(times[0]) / min(times[1]), 2)


def _counted(step: Callable[[], None]) -> tuple[int, int]:
    """Return the numbers of torch operations and Python function calls of a step."""
    found = {"operations": 0, "call": 0}

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found["operations"] += 1
            return op(*args, **(kwargs or {}))

    with Operations():
        step()
    sys.setprofile(lambda frame, event, _: found.update({event: found.get(event, 0) + 1}))
    step()
    sys.setprofile(None)
    return found["operations"], found["call"]


def _without_gpu(stack: ExitStack) -> None:
    """Treat CPU tensors as tensors on a Hopper GPU, with launches that do nothing."""
    utils = {
        "load_binary": lambda *_: (1, 1, 32, 0, 1024),
        "get_device_properties": lambda _: {"max_shared_mem": 232448},
        "unload_module": lambda _: None,
    }
    fake = SimpleNamespace(
        utils=SimpleNamespace(**utils),
        launcher_cls=lambda *_: lambda *_: None,
        get_current_target=lambda: compiled.TARGETS["sm_90"],
        get_current_device=lambda: None,  # torch.device("cpu") has the index None
        get_current_stream=lambda _: 0,
    )
    driver.set_active(fake)
    zeros = functools.cache(torch.zeros)
    for owner, name, new in (
        (triton_launch, "hardware_of", functools.cache(lambda _: "sm_90")),
        (triton_launch, "is_direct", functools.cache(lambda _: True)),
        (gate_product, "is_supported", lambda *_: True),
        # On a CPU, torch cannot multiply bf16 into fp32, so zeros are multiplied.
        (gate_product, "_in_fp32", lambda a, b: torch.mm(zeros(a.shape), zeros(b.shape))),
        (kernels, "ops", lambda *_: triton_ops.BY_PRODUCTS),
    ):
        stack.enter_context(mock.patch.object(owner, name, new))


if __name__ == "__main__":
    sys.exit(main())
