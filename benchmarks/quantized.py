"""`python -m benchmarks.quantized`: measure times and errors of products with quantized expert matrices.

For each number of rows, all variants run alternately in one process:

- fp32: the product with the fp32 matrix;
- int8, int4: the product with the quantized matrix as it is stored;
- int8, int4 unpacked: conversion to fp32 and the product.

`error` is the norm of the difference to the product with the unpacked matrix in fp32, divided by the norm
of this product. The last part prints the error of each format for weights with a normal and a Laplace
distribution, and for comparison the error of int4 with one scale per row.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.machine import facts
from benchmarks.output import Report, Row
from benchmarks.timing import against, interleaved
from fairseq_tutel.checkpoint.quantized import Quantized, RoundingError
from fairseq_tutel.kernels.quantized import has_kernel

BASE = "fp32"
FORMATS = ("int8", "int4")
DISTRIBUTIONS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": torch.randn,
    "Laplace": lambda rows, width: torch.distributions.Laplace(0.0, 1.0).sample((rows, width)),
}


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 if a product is wrong, else 0."""
    parser = command.parser_of("quantized", "Time products with int8 and int4 matrices.")
    add = parser.add_argument
    add("--rows", type=command.positive, nargs="+", default=[1, 4, 16, 64], help="numbers of rows")
    add("--model-dim", type=command.positive, default=2048, help="width of the rows")
    add("--hidden-dim", type=command.positive, default=8192, help="width of the result")
    add("--threads", type=command.positive, nargs="+", default=[1, 2], help="numbers of threads of torch")
    add("--rounds", type=command.positive, default=15, help="measured rounds")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    if options.quick:
        options.rows, options.threads, options.rounds = options.rows[:2], [1], 2
        options.model_dim, options.hidden_dim = 128, 192
    machine = facts(torch.device("cpu"), torch.float32)
    machine["kernels"] = {name: has_kernel(name) for name in FORMATS}
    report = Report("quantized", BASE, machine, command.shown(options), options.json)
    torch.manual_seed(1)
    weight = torch.randn(options.hidden_dim, options.model_dim) / options.model_dim**0.5
    with torch.inference_mode():
        for threads in options.threads:
            torch.set_num_threads(threads)
            for rows in options.rows:
                x = torch.randn(rows, options.model_dim)
                shape = {"rows": rows, "shape": list(weight.shape)}
                report.add(f"{rows} rows", shape, _products(x, weight, threads, options.rounds))
        shape = tuple(weight.shape)
        for name, draw in DISTRIBUTIONS.items():
            report.add(f"weights: {name}", {}, _errors(draw(*shape)))
    report.finish()
    return int(any(row["status"] == "wrong" for row in report.rows))


def _products(x: Tensor, weight: Tensor, threads: int, rounds: int) -> list[Row]:
    """Return a row for every variant."""
    steps: dict[str, Callable[[], Tensor]] = {BASE: lambda: x @ weight.t()}
    exact = {BASE: steps[BASE]()}
    for name in FORMATS:
        form = Quantized(name, tuple(weight.shape), torch.float32)
        stored = form.quantize(weight)
        matrix = form.matrix(stored, torch.float32)
        assert matrix is not None
        unpacked = partial(lambda form, stored: x @ form.dequantize(stored).t(), form, stored)
        steps |= {name: partial(matrix.linear, x), f"{name} unpacked": unpacked}
        exact |= dict.fromkeys((name, f"{name} unpacked"), unpacked())
    times = against(interleaved(steps, rounds, x.device), BASE)
    found: list[Row] = []
    for name, step in steps.items():
        error = float((step() - exact[name]).norm() / exact[name].norm())
        row = {"variant": name, "threads": threads, "error": error}
        if error > 2**-8:
            row |= {"status": "wrong", "reason": f"its error is {error:.1e}"}
        else:
            row |= {"status": "ok", **times[name]}
        found.append(row)
    return found


def _errors(weight: Tensor) -> list[Row]:
    """Return the error of each format for a matrix, and the bits per weight of the format."""
    rows: list[Row] = []
    for name, in_rows in (("bf16", False), ("int8", False), ("int4", False), ("int4", True)):
        form = Quantized(name, tuple(weight.shape), torch.float32, in_rows)
        stored = form.quantize(weight)
        label = name + (" with a scale per row" if in_rows else "")
        bits = 8 * stored.nbytes / weight.numel()
        rows.append(_error(label, weight, form.dequantize(stored), bits))
    return rows


def _error(label: str, weight: Tensor, rounded: Tensor, bits: float) -> Row:
    error = RoundingError()
    error.add(weight, rounded)
    note = f"{bits:.2f} bits per weight, worst row {error.worst_row:.1e}"
    return {"variant": label, "status": "ok", "error": error.relative, "bits": bits, "note": note}


if __name__ == "__main__":
    sys.exit(main())
