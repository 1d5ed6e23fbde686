"""`python -m benchmarks.ops`: time every kernel op in every backend, and in the plain torch reference.

A configuration is one op with the dimensions of one layer. Before the timing, outputs are compared with
those of the reference in higher precision.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import command, timing
from benchmarks.layer_check import REFERENCE_DTYPES, TOLERANCES, relative_errors
from benchmarks.machine import device_of, facts
from benchmarks.op_inputs import CALLS, QUICK, SIZES, Call, make_tensors
from benchmarks.output import Report, Row
from fairseq_tutel import kernels
from fairseq_tutel.kernels import reference

BASE = "reference"
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROUNDS, WARM = {"cpu": 15, "cuda": 30}, {"cpu": 2, "cuda": 5}
QUICK_ROUNDS = 2


def main(words: list[str] | None = None) -> int:
    """Check and time all ops; return 1 if an op is wrong or failed, else 0."""
    parser = command.parser_of("ops", "Time every op of the kernels in every backend.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu in float32, cuda in bfloat16")
    add("--threads", type=int, default=1, help="on CPU")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    dtype = DTYPES[device.type]
    torch.set_num_threads(max(options.threads, 1))
    report = Report("ops", BASE, facts(device, dtype), command.shown(options), options.json)
    backends, missing = available(device)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS[device.type]
    sizes = QUICK if options.quick else SIZES[device.type]
    for size_name, size in sizes.items():
        tensors = make_tensors(size, device, dtype)
        for name in kernels.OPS:
            rows = measured(name, CALLS[name](tensors), backends, rounds, device)
            report.add(f"{name} {size_name}", {"op": name, **asdict(size)}, [*rows, *missing])
    report.finish()
    return int(any(row["status"] in ("wrong", "failed") for row in report.rows))


def available(device: torch.device) -> tuple[dict[str, ModuleType], list[Row]]:
    """Return the backends that this machine supports, reference first, and a row for each other backend."""
    try:
        return {BASE: reference, "triton": kernels.ops("triton", device)}, []
    except ValueError as error:
        missing: Row = {"variant": "triton", "status": "skipped", "reason": str(error)}
        return {BASE: reference}, [missing]


def measured(
    name: str, call: Call, backends: Mapping[str, ModuleType], rounds: int, device: torch.device
) -> list[Row]:
    """Compare one op with the reference, and time the op in all backends.

    Args:
        name: name of the op, which is a function in the modules of the backends.
        call: arguments of the op.
        backends: dictionary from names to modules, including the reference.
        rounds: number of timed rounds.
        device: device of the arguments.
    """
    steps, rows = {}, {}
    wanted: dict[str, Tensor] = {}
    for backend, module in backends.items():
        row: Row = {"variant": backend, "status": "ok"}
        rows[backend] = row
        op = getattr(module, name)
        owner = next((other for other in steps if getattr(backends[other], name) is op), None)
        if owner is not None:
            row |= {"status": "skipped", "reason": f"its {name} is that of {owner}"}
            continue
        try:
            if not wanted:
                wide = _widened(call, device)
                wanted = _outputs(getattr(reference, name)(*wide.arguments))
            row |= _compared(_outputs(op(*call.arguments)), wanted, call)
        except Exception as error:  # an error of one backend does not stop the benchmark
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        if row["status"] == "ok":
            steps[backend] = lambda op=op: op(*call.arguments)
    took = timing.interleaved(steps, rounds, device, WARM[device.type])
    for backend, summary in timing.against(took, BASE).items():
        rate = call.work / summary["seconds"]
        rows[backend] |= {**summary, "rate": rate, "rate_unit": call.unit}
    return list(rows.values())


def _compared(got: dict[str, Tensor], wanted: dict[str, Tensor], call: Call) -> Row:
    errors = relative_errors(got, wanted)
    # Integers must be equal; other outputs have rounding errors of the op's dtype, even if stored wider.
    floats = (value.dtype for value in _tensors_of(call) if value.is_floating_point())
    dtype = min(floats, key=lambda each: each.itemsize, default=None)
    for key, error in errors.items():
        exact = not wanted[key].is_floating_point()
        if error > (0.0 if exact or dtype is None else TOLERANCES[dtype]):
            return {"status": "wrong", "reason": f"output {key} is off by {error:.1e}"}
    return {"error": max(errors.values())}


def _tensors_of(call: Call) -> list[Tensor]:
    return [value for value in call.arguments if isinstance(value, Tensor)]


def _outputs(result: Any) -> dict[str, Tensor]:
    """Return a dictionary from the position of each output tensor of an op to the tensor."""
    several = result if isinstance(result, Sequence) else [result]
    return {str(i): value for i, value in enumerate(several) if isinstance(value, Tensor)}


def _widened(call: Call, device: torch.device) -> Call:
    """Return the op's arguments with all floating-point tensors in the reference's precision."""
    dtype = REFERENCE_DTYPES[device.type]

    def wide(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return replace(call, arguments=tuple(map(wide, call.arguments)))


if __name__ == "__main__":
    sys.exit(main())
