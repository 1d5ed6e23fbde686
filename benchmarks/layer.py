"""`python -m benchmarks.layer`: time one MoE layer with each backend, a dense layer, and other packages.

All variants run alternately in one process. Before the timing, each variant is compared with a loop over
experts in higher precision. Wrong variants are not timed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks import command, timing
from benchmarks.layer_cases import CPU_CASES, CUDA_CASES, SMALL, Case
from benchmarks.layer_check import expected, relative_errors, tolerance
from benchmarks.layer_inputs import Inputs, make_inputs
from benchmarks.machine import device_of, facts
from benchmarks.memory import bytes_of_step, kept_bytes
from benchmarks.output import BadOption, Report, Row
from benchmarks.peers import BUILDERS, OWN, Builder
from benchmarks.peers.variant import Unsupported, Variant
from fairseq_tutel.kernels import backend_for
from fairseq_tutel.plugin import keep_freed_memory

BASE = "dense"
CASES = {"cpu": CPU_CASES, "cuda": CUDA_CASES}
DTYPES = {"cpu": "fp32", "cuda": "bf16"}
OF_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Forward with backward; on a GPU also the training forward without backward.
MODES = {"cpu": ("forward+backward",), "cuda": ("forward", "forward+backward")}
# Cost of a mode in units of a forward: backward has two products, for the input and for the weights.
FORWARDS = {"forward": 1, "forward+backward": 3}
ROUNDS, WARM = {"cpu": 15, "cuda": 20}, {"cpu": 1, "cuda": 10}
QUICK_ROUNDS = 2


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 if a variant of this project is wrong or failed, else 0.

    Args:
        words: the command-line arguments; None means sys.argv.
    """
    parser = command.parser_of("layer", "Time one MoE layer and other implementations of it.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where")
    add("--dtype", choices=OF_NAMES, help="fp32 on cpu and bf16 on cuda by default")
    add("--configs", help="names separated by commas, or small; all of the device by default")
    add("--variants", help="names separated by commas; all by default, dense always")
    add("--threads", type=command.positive, nargs="+", default=[1, 2], help="on a CPU, in turn")
    add("--rounds", type=command.positive, help="timed rounds: 15 on CPU, 20 on cuda by default")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    cases = _chosen("--configs", options.configs, CASES[device.type])
    builders = BUILDERS
    if options.variants is None:
        same = f"ours/{backend_for('auto', device)[0]}"  # measured as ours/auto
        builders = {name: build for name, build in builders.items() if name != same}
    chosen = _chosen("--variants", options.variants, builders)
    chosen = {BASE: BUILDERS[BASE], **chosen}
    dtype = OF_NAMES[options.dtype or DTYPES[device.type]]
    # The plugin sets this in CPU training too; it also makes dense layers faster.
    keeps = device.type == "cpu" and keep_freed_memory()
    report = Report(
        "layer",
        BASE,
        {**facts(device, dtype), "keeps_freed_memory": keeps},
        command.shown(options),
        options.json,
    )
    for name, case in cases.items():
        case = case.tiny() if options.quick else case
        for about, rows in _rows_of(case, chosen, options, device, dtype):
            report.add(name, about, rows)
    report.finish()
    own = [row for row in report.rows if row["variant"] in OWN]
    return int(any(row["status"] in ("wrong", "failed") for row in own))


def _chosen(flag: str, words: str | None, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a table whose names an option lists, in the table's order."""
    names = list(table) if words is None else words.split(",")
    names = [name for word in names for name in (SMALL if word == "small" else (word,))]
    for name in names:
        if name not in table:
            raise BadOption(f"{flag} has {name!r}; choose among {', '.join(table)}.")
    return {name: table[name] for name in table if name in names}


def _rows_of(
    case: Case,
    builders: Mapping[str, Builder],
    options: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Yield the properties of the configuration and the rows, for every number of threads."""
    inputs = make_inputs(case, device, dtype)
    about = {
        **asdict(case),
        "forward_flops": case.forward_flops,
        "busiest_over_mean": inputs.busiest * case.num_experts / sum(inputs.loads_E),
    }
    variants, rows = checked(case, inputs, builders)
    on_cpu = device.type == "cpu"
    memory = {key: memory_of(each, inputs) for key, each in variants.items()}
    for threads in options.threads if on_cpu else [None]:
        if threads is not None:
            torch.set_num_threads(threads)
        rounds = QUICK_ROUNDS if options.quick else options.rounds or ROUNDS[device.type]
        timed = []
        for mode in MODES[device.type]:
            steps = {key: step_of(mode, each, inputs) for key, each in variants.items()}
            took = timing.interleaved(steps, rounds, device, WARM[device.type])
            for key, summary in timing.against(took, BASE).items():
                flops = FORWARDS[mode] * case.forward_flops
                row = {"mode": mode, **rows[key], **summary, **memory[key]}
                row |= {"rate": flops / summary["seconds"], "rate_unit": "FLOP/s"}
                timed.append(row)
        rest = [row for key, row in rows.items() if key not in variants]
        threaded = {} if threads is None else {"threads": threads}
        yield about, [{**row, **threaded} for row in (*timed, *rest)]


def checked(
    case: Case, inputs: Inputs, builders: Mapping[str, Builder]
) -> tuple[dict[str, Variant], dict[str, Row]]:
    """Build every variant and compare its output and gradients with the loop over experts.

    Returns:
        variants: dictionary from names to the variants with correct results.
        rows: status of every variant by name; with the largest error and each tensor's error if it ran.
    """
    variants, rows = {}, {}
    wanted: dict[int | None, dict[str, Tensor]] = {}
    for name, build in builders.items():
        row: Row = {"variant": name, "status": "ok"}
        try:
            variant = build(case, inputs)
            row["note"] = variant.note
            y = variant(inputs.x_TD)
            y.backward(inputs.dy_TD)
            if variant.is_layer:
                if variant.capacity not in wanted:
                    wanted[variant.capacity] = expected(case, inputs, variant.capacity)
                row |= _compared(y.detach(), variant, inputs, wanted[variant.capacity])
            _drop_gradients(variant, inputs)
            if row["status"] == "ok":
                variants[name] = variant
        except (ImportError, Unsupported) as error:
            row |= {"status": "skipped", "reason": str(error)}
        except Exception as error:  # Any exception: the other variants are measured nevertheless.
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        rows[name] = row
    return variants, rows


def _compared(y: Tensor, variant: Variant, inputs: Inputs, wanted: dict[str, Tensor]) -> Row:
    """Return a variant's errors; if an error is too large, also the status "wrong" and a reason."""
    got = {"y": y, "dx": inputs.x_TD.grad}
    got |= {f"d{key}": gradient for key, gradient in variant.gradients().items()}
    errors = relative_errors(got, wanted)
    worst = max(errors, key=lambda key: errors[key] / tolerance(key, inputs.x_TD.dtype))
    # JSON has no number for infinity.
    finite = {key: error if error < float("inf") else None for key, error in errors.items()}
    found = {"error": finite[worst], "error_of": worst, "errors": finite}
    if errors[worst] <= tolerance(worst, inputs.x_TD.dtype):
        return found
    reason = f"{worst} is off by {errors[worst]:.1e} of its norm"
    return {**found, "status": "wrong", "reason": reason}


def step_of(mode: str, variant: Variant, inputs: Inputs) -> timing.Step:
    """Return a function that runs forward only (saving activations), or forward and backward."""
    if mode == "forward":
        return lambda: variant(inputs.x_TD)

    def step() -> None:
        _drop_gradients(variant, inputs)
        variant(inputs.x_TD).backward(inputs.dy_TD)

    return step


def _drop_gradients(variant: Variant, inputs: Inputs) -> None:
    variant.zero_grad(set_to_none=True)
    inputs.x_TD.grad = None


def memory_of(variant: Variant, inputs: Inputs) -> dict[str, int]:
    """Return kept_bytes, formula_bytes (if the variant has a formula), and on a GPU the allocated bytes."""

    def clear() -> None:
        _drop_gradients(variant, inputs)

    forward: Callable[[], Tensor] = lambda: variant(inputs.x_TD)  # noqa: E731
    found = {"kept_bytes": kept_bytes(forward, (inputs.x_TD, *variant.parameters()))}
    if variant.formula_bytes is not None:
        found["formula_bytes"] = variant.formula_bytes
    if inputs.x_TD.device.type == "cuda":
        found |= bytes_of_step(forward, inputs.dy_TD, clear)
    return found


if __name__ == "__main__":
    sys.exit(main())
