"""`python -m benchmarks.tiles`: time tile sizes of the grouped products on this GPU; print table rows.

python -m benchmarks.tiles                          the layers A, C and E of benchmarks/layer_cases.py
python -m benchmarks.tiles C 8192,2048,1408,64,6    C, and a layer of T, D, H, E and K; --swiglu for SwiGLU

The rows are for `TABLE` of kernels/tiles.py. The user must add the shape class of each row.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks import command, timing
from benchmarks.layer_cases import CUDA_CASES, Case
from benchmarks.op_inputs import CALLS, Call, Sizes, Tensors, make_tensors
from benchmarks.output import BadOption
from fairseq_tutel import kernels
from fairseq_tutel.kernels.tiles import Tile, choose, fitted

ROUNDS, WARM, QUICK_ROUNDS = 20, 5, 1
# Rows and columns of the timed tiles. Their number of stages differs at most by one from the current tile.
SIZES = ((64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
# Before each product, the GPU is kept busy for about a millisecond, so that it never waits for the host.
BUSY_CYCLES = 1_500_000
CHOOSE = "fairseq_tutel.kernels.triton_launch.choose"  # this function returns the tile of a product


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiles", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("layers", nargs="*", default=["A", "C", "E"], help=f"T,D,H,E,K or one of {', '.join(CUDA_CASES)}")
    add("--swiglu", action="store_true", help="the layers that are given as numbers have SwiGLU experts")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add(
        "--quick",
        action="store_true",
        help="one tiny layer, also in Triton's interpreter; times are meaningless",
    )
    parser.set_defaults(json=None)
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not (options.quick and kernels.interpreted()):
        raise BadOption("this benchmark needs a GPU, and torch sees none here.")
    device = torch.device("cuda:0" if on_gpu else "cpu")
    name = torch.cuda.get_device_name(device) if on_gpu else "interpreter"
    layers = ["A"] if options.quick else options.layers
    for case in [_case(layer, options.swiglu) for layer in layers]:
        sizes = asdict(case.tiny() if options.quick else case)
        own = {field.name: sizes[field.name] for field in fields(Sizes) if field.name in sizes}
        tensors = make_tensors(Sizes(**own, glu=case.is_glu), device, getattr(torch, options.dtype))
        for op, call in _products(tensors):
            for line in _rows(op, call, device, name, QUICK_ROUNDS if options.quick else ROUNDS):
                print(line, flush=True)
    return 0


def _case(text: str, swiglu: bool) -> Case:
    if text in CUDA_CASES:
        return CUDA_CASES[text]
    numbers = text.split(",")
    if len(numbers) != 5 or not all(n.isdecimal() and int(n) for n in numbers):
        raise BadOption(f"a layer is {text!r}; give T,D,H,E,K or one of {', '.join(CUDA_CASES)}.")
    names = ("tokens", "model_dim", "hidden_dim", "num_experts", "top_k")
    sizes: dict[str, Any] = dict(zip(names, map(int, numbers), strict=True))
    return Case(**sizes, activation="swiglu" if swiglu else "relu")


def _products(t: Tensors) -> Iterator[tuple[str, Call]]:
    """Yield the matrix products of forward and backward, with their arguments."""
    for op in ("ffn_up", "grouped_linear", "ffn_down_backward", "ffn_up_backward", "grouped_weight_grad"):
        yield op, CALLS[op](t)
    fc1 = Call(arguments=(t.a_RH, t.rows_RD, t.groups), work=t.product_flops)
    yield "grouped_weight_grad", fc1


def _rows(op: str, call: Call, device: torch.device, name: str, rounds: int) -> Iterator[str]:
    """Time the candidates of one product; yield the fastest candidate's row, then all as comments."""
    kind, hardware, precision, rows, experts, n, k = given = _chosen(op, call, device)
    in_force = choose(*given)
    steps: dict[Tile, Callable[[], object]] = {}
    for tile in _candidates(in_force, kind, rows // experts, n, k):
        step = _step(op, call, device, tile)
        try:
            step()  # the first call compiles the kernel
        except Exception as error:  # for example, too little shared memory for the tile
            yield f"# {kind} {tile}: {type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            steps[tile] = step
    by_name = {str(tile): step for tile, step in steps.items()}
    busy = (lambda: torch.cuda._sleep(BUSY_CYCLES)) if device.type == "cuda" else (lambda: None)
    times = timing.interleaved(by_name, rounds, device, WARM if rounds > 1 else 0, busy)
    rates = {tile: call.work / median(times[str(tile)]) / 1e12 for tile in steps}
    best = max(rates, key=lambda tile: rates[tile])
    gain = 100 * (rates[best] / rates[in_force] - 1)
    shape = f"{rows // experts} rows, n {n}, k {k}"
    reason = f"{name}, {shape}: {rates[best]:.3g} TFLOP/s, {gain:.1f} % over {tuple(in_force)}"
    yield f'Row("{hardware}", "{precision}", "{kind}", Tile{tuple(best)}, "{reason}"),'
    for tile, rate in sorted(rates.items(), key=lambda item: -item[1]):
        yield f"# {tuple(tile)}: {rate:.3g} TFLOP/s{' (in force)' if tile == in_force else ''}"


def _candidates(in_force: Tile, kind: str, rows: int, n: int, k: int) -> list[Tile]:
    """Return the tiles to time: the current tile first, and none that is larger than the matrices."""
    found = [
        in_force._replace(
            block_m=m, block_n=columns, warps=8 if m * columns > 64 * 128 else 4, stages=stages
        )
        for m, columns in SIZES
        for stages in range(max(in_force.stages - 1, 1), in_force.stages + 2)
    ]
    return list(dict.fromkeys([in_force, *(fitted(tile, kind, rows, n, k) for tile in found)]))


def _chosen(op: str, call: Call, device: torch.device) -> tuple[str, str, str, int, int, int, int]:
    """Return the arguments that determine the tile of a product."""
    found: list[Any] = []
    with mock.patch(CHOOSE, lambda *given: found.append(given) or choose(*given)):
        getattr(kernels.ops("triton", device), op)(*call.arguments)
    return tuple(found[0])


def _step(op: str, call: Call, device: torch.device, tile: Tile) -> Callable[[], object]:
    """Return a function that runs a matrix product with a tile."""
    function = getattr(kernels.ops("triton", device), op)

    def step() -> object:
        with mock.patch(CHOOSE, lambda *_: tile):
            return function(*call.arguments)

    return step


if __name__ == "__main__":
    sys.exit(main())
