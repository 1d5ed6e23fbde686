"""Every benchmark runs with --quick; the layer benchmark's formulas are correct. No test compares times."""

import importlib
import json
import os
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import forkserver
import oracle
import pytest
import torch

import benchmarks
from benchmarks import layer, layer_cases, layer_check, layer_inputs, ops, timing
from benchmarks.peers import BUILDERS
from fairseq_tutel import kernels

ROOT = Path(__file__).parents[2]
LONG = {"checkpoint", "cluster", "collectives", "compiled", "schedule", "step", "store", "tiles"}
QUICK = {"generate", "gpu_speed", "host", "layer", "ops", "quantized"}
WORDS = {
    "collectives": ["--ranks", "2"],
    "compiled": ["--targets", "gfx942"],
    "gpu_speed": ["--cases", "A"],
    "layer": ["--configs", "k1_uniform,e64_zipf", "--threads", "1"],
    "ops": ["--device", "cpu"],
}


def run(name, words):
    os.chdir(ROOT)
    return importlib.import_module(f"benchmarks.{name}").main(words)


def test_every_benchmark_with_a_command_is_run():
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.ispkg}
    commands = {name for name in modules if "def main(" in (ROOT / "benchmarks" / f"{name}.py").read_text()}
    assert commands == LONG | QUICK


@pytest.mark.parametrize(
    "name", [*sorted(QUICK), *(pytest.param(name, marks=pytest.mark.long) for name in sorted(LONG))]
)
def test_a_quick_run_succeeds_and_writes_its_rows(name, tmp_path):
    path = tmp_path / "out.json"
    words = ["--quick", *WORDS.get(name, [])]
    has_file = name not in ("gpu_speed", "host", "tiles")
    if name == "tiles" and not torch.cuda.is_available() and not kernels.interpreted():
        pytest.skip("not run: needs a GPU or Triton's interpreter")
    words += ["--json", str(path)] if has_file else []
    with ProcessPoolExecutor(1, forkserver.context()) as pool:
        assert pool.submit(run, name, words).result() == 0
    if has_file:
        found = json.loads(path.read_text())
        assert found["rows"] and str(tmp_path) not in path.read_text()
        assert {row.get("status", "ok") for row in found["rows"]} <= {"ok", "skipped"}


def small(**sizes):
    case = layer_cases.CPU_CASES["k1_zipf"].tiny()
    return layer_cases.replace(case, **sizes)


def test_a_variant_with_wrong_results_is_detected():
    built = dict(BUILDERS)

    def louder(case, inputs):
        variant = built["loop"](case, inputs)
        variant.register_forward_hook(lambda module, arguments, y: 1.001 * y)
        return variant

    def without_gradient(case, inputs):
        variant = built["grouped_mm"](case, inputs)
        variant.gate.requires_grad_(False)
        return variant

    builders = {**built, "loop": louder, "grouped_mm": without_gradient}
    case = small()
    inputs = layer_inputs.make_inputs(case, torch.device("cpu"), torch.float32)
    _, rows = layer.checked(case, inputs, builders)
    assert rows["loop"]["status"] == rows["grouped_mm"]["status"] == "wrong"
    assert rows["loop"]["errors"]["y"] == pytest.approx(1e-3, rel=0.01)
    assert rows["ours/auto"]["status"] == "ok"


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("drops", [False, True])
def test_the_reference_equals_the_layer(activation, drops):
    case = small(tokens=24, top_k=2, activation=activation)
    inputs = layer_inputs.make_inputs(case, torch.device("cpu"), torch.float64)
    capacity = case.top_k * -(-case.tokens // case.num_experts)
    assert inputs.busiest > capacity
    wanted = layer_check.expected(case, inputs, capacity if drops else None)
    ours = BUILDERS["ours/reference"](case, inputs)
    y, _ = oracle.mixture(ours.layer, inputs.x_TD, case.top_k, factor=1.0 if drops else 0.0)
    y.backward(inputs.dy_TD)
    got = {"y": y.detach(), "dx": inputs.x_TD.grad}
    got |= {f"d{name}": gradient for name, gradient in ours.gradients().items()}
    assert max(layer_check.relative_errors(got, wanted).values()) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("variant", ["ours/auto", "ours/recompute"])
def test_the_formula_for_saved_activations_is_correct(activation, dtype, variant):
    case = small(top_k=2, activation=activation, hidden_dim=256)
    inputs = layer_inputs.make_inputs(case, torch.device("cpu"), dtype)
    found = layer.memory_of(BUILDERS[variant](case, inputs), inputs)
    assert 0.85 <= found["kept_bytes"] / found["formula_bytes"] <= 1


def test_ratios_compare_times_of_one_round():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.interleaved(steps, 4, torch.device("cpu"), warm=2)
    assert ["".join(order[i : i + 3]) for i in range(0, 18, 3)] == [
        "abc",
        "acb",
        "cab",
        "cba",
        "bca",
        "bac",
    ]
    # If the machine is three times as slow in the last round, the ratio stays the same.
    summary = timing.against({"a": [1.0, 1.0, 3.0], "b": [2.0, 2.0, 6.0]}, "a")["b"]
    assert (summary["ratio_p20"], summary["ratio"], summary["ratio_p80"]) == (2, 2, 2)


def test_every_op_has_inputs():
    assert set(ops.CALLS) == set(kernels.OPS)
