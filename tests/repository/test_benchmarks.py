"""Runs the benchmarks of layers and ops by their commands; asserts no time."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
import torch

ROOT = Path(__file__).parents[2]
MODULES = (
    "gpu_speed", "layer", "layer_cases", "layer_check", "layer_inputs", "memory", "op_inputs", "ops",
    "timing",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    """Return the benchmarks' modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        peers = importlib.import_module("benchmarks.peers")
        gate = importlib.import_module("benchmarks.peers.gate")
        modules = {name: importlib.import_module(f"benchmarks.{name}") for name in MODULES}
        patch.setattr(modules["layer"], "keep_freed_memory", lambda: False)
        yield SimpleNamespace(peers=peers, gate=gate, **modules)


def run(*words, **options):
    """Run a command in the project's folder, and return it when it has ended well."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_quick_run_of_the_layer_leaves_file_table_and_plot(bench, tmp_path, capsys):
    path, plot = tmp_path / "out.json", tmp_path / "out.png"
    words = ("--configs", "k1_uniform,e64_zipf", "--threads", "1", "--quick")
    assert bench.layer.main([*words, "--json", str(path), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert (found["benchmark"], found["base"], found["complete"]) == ("layer", "dense", True)
    assert {"torch", "triton", "device", "dtype", "keeps_freed_memory"} <= found["machine"].keys()
    assert str(tmp_path) not in path.read_text()
    assert found["configurations"]["e64_zipf"]["zipf"] == 1.0
    assert {row["configuration"] for row in found["rows"]} == {"k1_uniform", "e64_zipf"}
    ran = {row["variant"]: row for row in found["rows"] if row["status"] == "ok"}
    ours = {"ours/auto", "ours/recompute"}
    assert {"dense", "products", "einsum", "loop", "grouped_mm"} | ours <= ran.keys()
    assert ran["products"]["over_products"] == 1
    assert "ours/reference" not in ran  # is ours/auto here
    for name, row in ran.items():
        assert row["seconds"] > 0 and row["rate"] > 0 and row["threads"] == 1
        assert row["ratio_p20"] <= row["ratio"] <= row["ratio_p80"] and row["kept_bytes"] > 0
        if name not in ("dense", "products"):
            assert row["errors"].keys() == {"y", "dx", "dgate", "dfc1", "dfc2"}
            assert row["error"] == row["errors"][row["error_of"]] < 1e-5
    left_out = {row["variant"]: row for row in found["rows"] if row["status"] == "skipped"}
    assert left_out["ours/triton"]["reason"].startswith("backend (--moe-backend) is 'triton' but")
    assert {"tutel", "scattermoe", "liger_kernel", "megablocks"} <= left_out.keys() | ran.keys()
    assert "| ours/recompute " in printed and "not run: megablocks: " in printed
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_one_token_is_inference_and_the_bare_operations_are_the_layer(bench, tmp_path, dtype):
    path = tmp_path / "out.json"
    words = ["--configs", "one_token_k2,small_recipe", "--variants", "ours/auto,products,bare", "--quick"]
    assert bench.layer.main([*words, "--dtype", dtype, "--threads", "1", "--json", str(path)]) == 0
    rows = {(row["configuration"], row["variant"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows["one_token_k2", "ours/auto"]["mode"] == "inference"
    assert rows["small_recipe", "ours/auto"]["mode"] == "forward+backward"
    for name in ("one_token_k2", "small_recipe"):
        if dtype == "fp32":
            assert rows[name, "bare"]["status"] == "ok" and rows[name, "bare"]["error"] < 1e-5
        else:
            assert rows[name, "bare"]["status"] == "skipped" and rows[name, "products"]["status"] == "ok"


@pytest.mark.long
def test_a_quick_run_of_collectives_leaves_file_and_plot(tmp_path):
    path, plot = tmp_path / "out.json", tmp_path / "out.png"
    words = ("--quick", "--ranks", "2", "--json", path, "--plot", plot)
    done = run("-m", "benchmarks.collectives", *words)
    found = json.loads(path.read_text())
    assert (found["base"], found["complete"]) == ("gloo", True)
    assert len(found["configurations"]) == 5 * 2 and len(found["rows"]) == 3 * 5 * 2
    for row in found["rows"]:
        assert row["status"] == "ok" and row["rate"] > 0 and row["ratio"] > 0
        assert row["note"] in {"gloo": [""]}.get(row["variant"], ["one_phase", "linear"])
    assert "all_to_all, 2 ranks, 4096 B" in done.stdout and plot.stat().st_size > 1000


def layer_rows(bench, path, builders):
    """Return the exit status and the rows of a small run of some variants beside dense."""
    words = ["--configs", "k2_zipf", "--threads", "1", "--quick", "--json", str(path)]
    status = bench.layer.main(words, {"dense": bench.peers.BUILDERS["dense"], **builders})
    return status, {row["variant"]: row for row in json.loads(path.read_text())["rows"]}


def broken(bench):
    """Return builders of variants that are wrong, and in what."""

    def louder(case, inputs):
        variant = bench.peers.BUILDERS["loop"](case, inputs)
        variant.register_forward_hook(lambda module, arguments, y: 1.001 * y)
        return variant

    def deaf(case, inputs):
        variant = bench.peers.BUILDERS["grouped_mm"](case, inputs)
        variant.gate.requires_grad_(False)
        return variant

    def one_expert_twice(case, inputs):
        variant = bench.peers.BUILDERS["grouped_mm"](case, inputs)
        variant.fc1.register_hook(lambda gradient: torch.cat([gradient[:1], gradient[:-1]]))
        return variant

    def not_a_number(case, inputs):
        variant = bench.peers.BUILDERS["loop"](case, inputs)
        variant.register_forward_hook(lambda module, arguments, y: y / 0)
        return variant

    def drops(case, inputs):
        variant = bench.peers.BUILDERS["einsum"](case, inputs)
        variant.places -= 1
        return variant

    return {"y": louder, "dgate": deaf, "dfc1": one_expert_twice, "infinite": not_a_number, "drops": drops}


def test_a_wrong_variant_is_reported_and_has_no_times(bench, tmp_path, capsys):
    wrong = broken(bench)
    status, rows = layer_rows(bench, tmp_path / "out.json", wrong)
    assert status == 1
    for name in wrong:
        assert rows[name]["status"] == "wrong", name
        assert "seconds" not in rows[name]
    for name in ("dgate", "dfc1"):
        assert rows[name]["reason"].startswith(f"{name} is off by")
    assert rows["y"]["errors"]["y"] == pytest.approx(1e-3, rel=0.01)
    assert rows["infinite"]["error"] is None
    assert "wrong: dgate is off by inf" in capsys.readouterr().out


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("drops", [False, True])
def test_the_reference_is_the_layer(bench, activation, top_k, drops):
    case = replace(
        bench.layer_cases.CPU_CASES["k1_zipf"].tiny(), tokens=24, top_k=top_k, activation=activation
    )
    inputs = bench.layer_inputs.make_inputs(case, torch.device("cpu"), torch.float64)
    capacity = top_k * -(-case.tokens // case.num_experts)
    assert inputs.busiest > capacity
    wanted = bench.layer_check.expected(case, inputs, capacity if drops else None)
    ours = bench.peers.BUILDERS["ours/reference"](case, inputs)
    y, _ = oracle.mixture(ours.layer, inputs.x_TD, top_k, factor=1.0 if drops else 0.0)
    y.backward(inputs.dy_TD)
    got = {"y": y.detach(), "dx": inputs.x_TD.grad}
    got |= {f"d{name}": gradient for name, gradient in ours.gradients().items()}
    errors = bench.layer_check.relative_errors(got, wanted)
    assert errors.keys() >= {"y", "dx", "dgate", "dfc1", "dfc2"}
    assert max(errors.values()) < 1e-11, errors


@pytest.mark.parametrize(
    "name, least, most", [("k1_uniform", 1.0, 1.2), ("k1_zipf", 2.5, 3.3), ("G", 9.0, 11.5)]
)
def test_loads_are_as_the_case_asks_in_every_precision(bench, name, least, most):
    cases = bench.layer_cases.CPU_CASES | bench.layer_cases.CUDA_CASES
    case = replace(cases[name], tokens=4096, model_dim=128, hidden_dim=8)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = bench.layer_inputs.make_inputs(case, torch.device("cpu"), dtype)
        _, ids_TK, _ = bench.gate.top_k_gate(inputs.x_TD, inputs.weights["gate"], case.top_k)
        assert torch.equal(ids_TK.sort().values, inputs.ids_TK.sort().values)
        assert sum(inputs.loads_E) == case.tokens * case.top_k
        assert least < inputs.busiest * case.num_experts / sum(inputs.loads_E) < most


def test_what_is_kept_counts_each_storage_once_and_nothing_that_led_nowhere(bench):
    x = torch.randn(10, requires_grad=True)
    weight = torch.randn(10, requires_grad=True)

    def forward():
        hidden = (x * weight).exp()
        (hidden * hidden.view(2, 5).flatten()).exp().sum()
        return hidden.view(2, 5) * hidden.sum()

    # Of hidden, its sum, x and the weight.
    assert bench.memory.kept_bytes(forward, ()) == 40 + 4 + 40 + 40
    assert bench.memory.kept_bytes(forward, (x, weight)) == 40 + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_ours_keeps_what_its_formula_says(bench, activation, top_k, dtype, recompute):
    tiny = bench.layer_cases.CPU_CASES["k1_zipf"].tiny()
    case = replace(tiny, top_k=top_k, activation=activation, hidden_dim=256)
    inputs = bench.layer_inputs.make_inputs(case, torch.device("cpu"), dtype)
    ours = bench.peers.BUILDERS["ours/recompute" if recompute else "ours/auto"](case, inputs)
    found = bench.layer.memory_of(ours, inputs)
    assert 0.85 <= found["kept_bytes"] / found["formula_bytes"] <= 1
    # With recomputation there is no room in it for hidden rows.
    hidden = case.tokens * top_k * case.hidden_dim * (2 if case.is_glu else 1) * dtype.itemsize
    assert (found["formula_bytes"] > hidden) is not recompute


def test_ratios_are_of_one_round_and_turns_change(bench):
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    times = bench.timing.interleaved(steps, 4, torch.device("cpu"), warm=2)
    assert [len(each) for each in times.values()] == [4, 4, 4]
    rounds = ["".join(order[i : i + 3]) for i in range(0, 18, 3)]
    assert rounds == ["abc", "acb", "cab", "cba", "bca", "bac"]
    # A machine that is three times as slow in the last round changes no ratio.
    summary = bench.timing.against({"a": [1.0, 1.0, 3.0], "b": [2.0, 2.0, 6.0]}, "a")["b"]
    assert (summary["ratio_p20"], summary["ratio"], summary["ratio_p80"]) == (2, 2, 2)
    assert (summary["seconds"], summary["seconds_p80"]) == (2.0, pytest.approx(4.4))


def test_a_quick_run_of_the_ops_has_every_op(bench, tmp_path):
    path = tmp_path / "out.json"
    assert bench.ops.main(["--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    from fairseq_tutel.kernels import OPS

    assert {f"{op} {size}" for op in OPS for size in ("tiny", "tiny_glu")} == set(found["configurations"])
    for row in found["rows"]:
        op = found["configurations"][row["configuration"]]["op"]
        runs = row["variant"] == "reference"
        assert row["status"] == ("ok" if runs else "skipped") and ("reason" in row) is not runs
        if runs:
            unit = "FLOP/s" if op.startswith(("grouped_", "ffn_")) else "B/s"
            assert row["rate"] > 0 and row["rate_unit"] == unit and row["error"] < 1e-6


def test_an_op_that_is_wrong_or_raises_is_reported(bench):
    tensors = bench.op_inputs.make_tensors(bench.op_inputs.TINY, torch.device("cpu"), torch.float32)
    reference = bench.ops.reference

    def doubled(*arguments, **keywords):
        dweight_EOI, dbias_EO = reference.grouped_weight_grad(*arguments, **keywords)
        return 2 * dweight_EOI, dbias_EO

    def displaced(*arguments):
        rows = reference.assign_rows(*arguments)
        return rows._replace(slots_TK=rows.slots_TK.sort(dim=0).values)

    wrong = {
        "gather_dot": lambda *arguments: reference.gather_dot(*arguments).roll(1, 0),
        "grouped_weight_grad": doubled,
        "assign_rows": displaced,
    }
    for name, function in wrong.items():
        backends = {
            "reference": reference,
            "wrong": SimpleNamespace(**{name: function}),
            "raises": SimpleNamespace(**{name: lambda: None}),
            "same": SimpleNamespace(**{name: getattr(reference, name)}),
        }
        call = bench.op_inputs.CALLS[name](tensors)
        rows = bench.ops.measured(name, call, backends, 2, torch.device("cpu"))
        assert [row["status"] for row in rows] == ["ok", "wrong", "failed", "skipped"], name
        assert rows[-1]["reason"] == f"its {name} is that of reference"
        assert "seconds" in rows[0] and not any("seconds" in row for row in rows[1:])


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--configs", "A"], "--configs has 'A'; choose among k1_uniform"),
        (["--variants", "hers"], "--variants has 'hers'; choose among dense, ours/auto"),
        (["--threads", "0"], "--threads or --rounds has 0"),
        (["--device", "cuda"], "--device is cuda but torch sees no GPU"),
        (["--json", "no/such/folder/out.json"], "which cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused(bench, words, reason, capsys):
    if words[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("not run: there is a GPU")
    with pytest.raises(SystemExit) as ended:
        bench.layer.main(words)
    assert ended.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_the_products_are_those_of_experts_without_an_activation(bench):
    case = replace(bench.layer_cases.CPU_CASES["k2_zipf"].tiny(), tokens=5, num_experts=8)
    inputs = bench.layer_inputs.make_inputs(case, torch.device("cpu"), torch.float64)
    variant = bench.peers.BUILDERS["products"](case, inputs)
    assert 0 in inputs.loads_E
    variant(inputs.x_TD).backward(inputs.dy_TD)
    maps = {name: inputs.weights[name].clone().requires_grad_() for name in ("fc1", "fc2")}
    weights_TK, ids_TK, _ = bench.gate.top_k_gate(inputs.x_TD, inputs.weights["gate"], 2)
    for t, j in ((t, j) for t in range(5) for j in range(2)):
        e = ids_TK[t, j]
        y = maps["fc2"][e] @ (maps["fc1"][e] @ inputs.x_TD[t].detach())
        (weights_TK[t, j].detach() * y @ inputs.dy_TD[t]).backward()
    for name, gradient in variant.gradients().items():
        torch.testing.assert_close(gradient, maps[name].grad)


def test_a_quick_run_of_quantized_products_measures_and_compares(tmp_path):
    path = tmp_path / "out.json"
    run("-m", "benchmarks.quantized", "--quick", "--json", path)
    found = json.loads(path.read_text())
    assert (found["base"], found["complete"]) == ("fp32", True)
    rows = [row for row in found["rows"] if "threads" in row]
    assert {row["variant"] for row in rows} == {"fp32", "int8", "int4", "int8 unpacked", "int4 unpacked"}
    assert all(row["status"] == "ok" and row["ratio"] > 0 and row["error"] < 2**-8 for row in rows)
    errors = {row["variant"]: row["error"] for row in found["rows"] if "normal" in row["configuration"]}
    rows = [errors[f"int4 with a scale per row{clipped}"] for clipped in ("", ", times 0.7")]
    assert errors["bf16"] < errors["int8"] < errors["int4"] < min(rows)


def test_a_quick_run_of_the_gpu_speed_prints_lines_and_a_table(bench, tmp_path, capsys):
    words = ["--quick", "--variants", "dense,ours/auto,megablocks"]
    assert bench.gpu_speed.main([*words, "--cases", "E"]) == 0
    assert bench.gpu_speed.main([*words, "--cases", "S", "--what", "host"]) == 0
    text = capsys.readouterr().out
    rows = {(row["case"], row["variant"]): row for row in map(json.loads, text.splitlines())}
    assert len(rows) == 6
    for variant in ("dense", "ours/auto"):
        assert rows["E", variant]["kernels_ms"] > 0 and rows["E", variant]["largest"]
        assert rows["S", variant]["step_us"] >= rows["S", variant]["forward_us"] > 0
    assert "skipped" in rows["E", "megablocks"] or torch.cuda.is_available()
    (tmp_path / "lines").write_text(f"a log\n{text}")
    assert bench.gpu_speed.main(["--table", str(tmp_path / "lines")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + 6 and str(rows["E", "dense"]["kernels_ms"]) in shown[1]
