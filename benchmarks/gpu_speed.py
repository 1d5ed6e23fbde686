"""`python -m benchmarks.gpu_speed`: time forward and backward of one MoE layer on a GPU; print JSON lines.

--what kernels: the sum of the kernels' times, from torch's profiler. --what host: the time until all
kernels of a step are enqueued, without waiting for the GPU. --table FILE prints a table from the JSON lines
in a file. `benchmarks/gpu.sh` runs all of these.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.layer_cases import CUDA_CASES, Case
from benchmarks.layer_inputs import Inputs, make_inputs
from benchmarks.peers import BUILDERS, OWN
from benchmarks.peers.variant import Unsupported, Variant

WARM, PROFILED, HOST_ROUNDS = 6, 5, 40
TOP = 8  # number of kernels that each JSON line lists
COLUMNS = ("kernels_ms", "tflops", "launches", "forward_us", "step_us", "wps", "skipped", "failed")


def main(words: list[str] | None = None) -> int:
    """Measure, and print a line for each case and variant; return 1 if a variant of this project failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_speed", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--what", choices=MEASURES, default="kernels", help="what is measured")
    add("--cases", default="A,C,E", help=f"of {', '.join(CUDA_CASES)}")
    add("--variants", default="dense,ours/auto,grouped_mm", help=f"of {', '.join(BUILDERS)}")
    add("--table", type=Path, help="print the table of a file with lines, and measure nothing")
    add("--quick", action="store_true", help="tiny shapes, on a CPU if there is no GPU, as a smoke test")
    options = parser.parse_args(words)
    if options.table is not None:
        print(table(options.table.read_text()))
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() or not options.quick else "cpu")
    failed = False
    for name in options.cases.split(","):
        case = CUDA_CASES[name].tiny() if options.quick else CUDA_CASES[name]
        inputs = make_inputs(case, device, torch.bfloat16)
        for variant in options.variants.split(","):
            line = {"case": name, "variant": variant, **_measured(options.what, variant, case, inputs)}
            print(json.dumps(line), flush=True)
            failed |= "failed" in line and variant in OWN
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return int(failed)


def _measured(what: str, name: str, case: Case, inputs: Inputs) -> dict[str, Any]:
    try:
        variant = BUILDERS[name](case, inputs).to(inputs.x_TD.device)
        return MEASURES[what](variant, case, inputs)
    except (ImportError, Unsupported) as error:
        return {"skipped": str(error)}
    except Exception as error:  # the other variants are measured nevertheless
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def _kernels(variant: Variant, case: Case, inputs: Inputs) -> dict[str, Any]:
    """Return the kernels' milliseconds in a step, TFLOP/s, launches, and the largest kernels."""
    on_gpu = inputs.x_TD.device.type == "cuda"
    for _ in range(WARM):
        _step(variant, inputs)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    _wait(inputs)
    with profile(activities=activities) as profiled:
        for _ in range(PROFILED):
            _step(variant, inputs)
        _wait(inputs)
    kind, attribute = (
        (DeviceType.CUDA, "self_device_time_total") if on_gpu else (DeviceType.CPU, "self_cpu_time_total")
    )
    found = sorted(
        (getattr(event, attribute) / PROFILED, event.count / PROFILED, event.key)
        for event in profiled.key_averages()
        if event.device_type == kind and getattr(event, attribute) > 0
    )
    microseconds = sum(own for own, _, _ in found)
    return {
        "kernels_ms": round(microseconds / 1e3, 3),
        "tflops": round(3 * case.forward_flops / microseconds / 1e6, 1),
        "launches": round(sum(count for _, count, _ in found)),
        "largest": [[round(own), round(count), key[:60]] for own, count, key in found[: -TOP - 1 : -1]],
    }


def _host(variant: Variant, case: Case, inputs: Inputs) -> dict[str, Any]:
    """Return the host's microseconds of a forward, and of a forward and backward."""
    # Backward runs in this thread, because waking another thread costs time.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM):
            _step(variant, inputs)
        forward = _enqueued(lambda: variant(inputs.x_TD), inputs)
        step = _enqueued(lambda: _step(variant, inputs), inputs)
    return {"forward_us": round(forward * 1e6), "step_us": round(step * 1e6)}


MEASURES: dict[str, Callable[[Variant, Case, Inputs], dict[str, Any]]] = {
    "kernels": _kernels,
    "host": _host,
}


def _step(variant: Variant, inputs: Inputs) -> None:
    variant(inputs.x_TD).backward(inputs.dy_TD)
    variant.zero_grad(set_to_none=True)
    inputs.x_TD.grad = None


def _enqueued(run: Callable[[], object], inputs: Inputs) -> float:
    """Return the median time in seconds of a call of `run`, which starts on an idle GPU."""
    seconds = []
    for _ in range(HOST_ROUNDS):
        _wait(inputs)
        begin = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - begin)
        del result
    return median(seconds)


def _wait(inputs: Inputs) -> None:
    if inputs.x_TD.device.type == "cuda":
        torch.cuda.synchronize()


def table(text: str) -> str:
    """Return a table of the JSON lines in a text; the last line of each case and variant is used."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            rows.setdefault((found["case"], found["variant"]), {}).update(found)
    cells = [("case", "variant", *COLUMNS)]
    cells += [(*key, *(str(row.get(name, ""))[:60] for name in COLUMNS)) for key, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
    )


if __name__ == "__main__":
    sys.exit(main())
