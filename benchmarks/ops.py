"""`python -m benchmarks.ops`: every op of the kernels in every backend, beside the plain torch reference.

A configuration is an op at a size. Outputs are compared with the reference in higher precision first.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import command, timing
from benchmarks.layer_check import REFERENCE_DTYPES, TOLERANCES, relative_errors
from benchmarks.machine import device_of, facts
from benchmarks.op_inputs import CALLS, SIZES, TINY, Call, make_maps
from benchmarks.output import Report, Row
from fairseq_tutel import kernels
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.kernels import reference

BASE = "reference"
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROUNDS, WARM, QUICK_ROUNDS = 30, 5, 2


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 where an op is wrong or failed, else 0."""
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
    sizes = {"tiny": TINY} if options.quick else SIZES[device.type]
    for size_name, size in sizes.items():
        maps = make_maps(size, device, dtype)
        for name in kernels.OPS:
            rows = missing
            if name in CALLS:
                rounds = QUICK_ROUNDS if options.quick else ROUNDS
                rows = [*measured(name, CALLS[name](maps), backends, rounds, device), *missing]
            else:
                reason = f"{name} has no arguments in benchmarks/op_inputs.py"
                rows = [{"variant": BASE, "status": "skipped", "reason": reason}]
            report.add(f"{name} {size_name}", {"op": name, **asdict(size)}, rows)
    report.finish(options.plot)
    return int(any(row["status"] in ("wrong", "failed") for row in report.rows))


def available(device: torch.device) -> tuple[dict[str, ModuleType], list[Row]]:
    """Return the backends that run here, the reference first, and a row for each that does not."""
    (backend,) = (item for item in fields(MoEConfig) if item.name == "backend")
    found, missing = {BASE: reference}, []
    for name in backend.metadata["choices"]:
        try:
            # auto is one of the others.
            if name not in (BASE, "auto"):
                found[name] = kernels.ops(name, device)
        except ValueError as error:
            missing.append({"variant": name, "status": "skipped", "reason": str(error)})
    return found, missing


def measured(
    name: str, call: Call, backends: Mapping[str, ModuleType], rounds: int, device: torch.device
) -> list[Row]:
    """Check and time one op in all backends.

    Args:
        name: of the op, a function of every backend that has it.
        call: its arguments.
        backends: modules by name, the reference among them.
        rounds: timed.
        device: of the arguments.
    """
    steps, rows = {}, {}
    wanted: dict[str, Tensor] = {}
    for backend, module in backends.items():
        row: Row = {"variant": backend, "status": "ok"}
        rows[backend] = row
        op = getattr(module, name, None)
        if op is None:
            row |= {"status": "skipped", "reason": f"{backend} has no {name}"}
            continue
        try:
            if not wanted:
                wide = _widened(call.arguments, device)
                wanted = _outputs(getattr(reference, name)(*wide))
            row |= _compared(_outputs(op(*call.arguments)), wanted, call)
        except Exception as error:  # the others are measured all the same
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        if row["status"] == "ok":
            steps[backend] = lambda op=op: op(*call.arguments)
    took = timing.interleaved(steps, rounds, device, WARM)
    for backend, summary in timing.against(took, BASE).items():
        rate = call.work / summary["seconds"]
        rows[backend] |= {**summary, "rate": rate, "rate_unit": call.unit}
    return list(rows.values())


def _compared(got: dict[str, Tensor], wanted: dict[str, Tensor], call: Call) -> Row:
    # The first argument's dtype is the op's.
    errors = relative_errors(got, wanted)
    worst = max(errors, key=lambda key: errors[key])
    if errors[worst] <= TOLERANCES[call.arguments[0].dtype]:
        return {"error": errors[worst]}
    return {"status": "wrong", "reason": f"output {worst} is off by {errors[worst]:.1e}"}


def _outputs(result: Any) -> dict[str, Tensor]:
    """Return the tensors that an op gave, by their place."""
    several = result if isinstance(result, Sequence) else [result]
    return {str(i): value for i, value in enumerate(several) if isinstance(value, Tensor)}


def _widened(arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return arguments with all floating point tensors in the reference's precision."""
    dtype = REFERENCE_DTYPES[device.type]
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in arguments
    )


if __name__ == "__main__":
    sys.exit(main())
