"""Runs the benchmarks that need fairseq by their commands; asserts no time."""

import json
import os
import runpy
import sys

import forkserver
import pytest
from cli import ROOT, TIMEOUT_S, tail

_context = forkserver.context()
# Run before the command, where the benchmark is to measure something wrong.
NEGATED_GATE = """
from benchmarks import einsum_model
from benchmarks.peers.gate import top_k_gate
einsum_model.top_k_gate = lambda x, gate, top_k: top_k_gate(x, -gate, top_k)
"""


def run(module, *words, before=""):
    """Run `python -m benchmarks.MODULE` in a fork; return its exit status and what it printed."""
    log = os.path.join(os.environ["FAIRSEQ_TUTEL_TEST_LOGS"], f"bench-{os.urandom(4).hex()}.log")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    arguments = (f"benchmarks.{module}", list(map(str, words)), before, log)
    process = _context.Process(target=_child, args=arguments)
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    with open(log) as file:
        return process.exitcode, file.read()


def _child(module, words, before, log):
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = [module, *words]
    exec(before, {})
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def measured(module, path, *words, unit="tokens/s"):
    """Return the file and the output of a small run that ended well."""
    code, output = run(module, "--quick", "--json", path, *words)
    assert code == 0, tail(output)
    found = json.loads(path.read_text())
    assert found["complete"] and found["benchmark"] == module and found["base"] == "dense"
    for row in (row for row in found["rows"] if row["status"] != "skipped"):
        assert row["seconds"] > 0 and row["ratio"] > 0 and row["rate_unit"] == unit
    return found, output


def test_a_step_of_a_language_model(tmp_path):
    found, output = measured("step", tmp_path / "out.json", "--top-k", 2, "--profile")
    about = found["configurations"]["moe_transformer_lm_gpt k2"]
    # One of two layers has experts, of which a token takes two of 32 hidden dimensions each.
    assert about["dense_ffn_dim"] == 48
    names = ["dense", "dense_stock_adam", "moe", "moe_einsum", "moe_bare"]
    assert [row["variant"] for row in found["rows"]] == names
    assert found["rows"][-1]["status"] == "skipped" and "gelu" in found["rows"][-1]["reason"]
    for name in ("dense", "moe"):
        entries = about["profile"][name]
        assert len(entries) == 10 and entries[0].keys() == {"name", "self_ms", "share", "calls"}
        assert entries == sorted(entries, key=lambda entry: -entry["self_ms"])
        assert f"{name}: the 10 largest" in output
    assert "| moe_einsum |" in " ".join(output.split())


def test_a_step_of_the_recipe_has_the_bare_operations(tmp_path):
    found, _ = measured("step", tmp_path / "out.json", "--arch", "language_model_recipe")
    assert {row["variant"]: row["status"] for row in found["rows"]}["moe_bare"] == "ok"


def test_beam_search(tmp_path):
    words = ("--batches", 1, 3, "--beams", 2)
    found, output = measured("generate_profile", tmp_path / "out.json", *words)
    assert list(found["configurations"]) == ["batch 1, beam 2", "batch 3, beam 2"]
    shares = [row["shares"] for row in found["rows"] if row["variant"] == "moe"]
    for each in shares:
        assert list(each) == ["products", "layer", "model", "search"]
        assert min(each.values()) > 0 and sum(each.values()) == pytest.approx(1, abs=0.3)  # medians
    assert len(shares) == 2 and "layer" in output


def test_generation(tmp_path):
    found, _ = measured("generate", tmp_path / "out.json", "--batches", 1, 3)
    assert [each["sentences"] for each in found["configurations"].values()] == [1, 3]
    assert [row["variant"] for row in found["rows"]] == 2 * ["dense", "moe", "products alone"]


def test_swin_with_experts(tmp_path):
    found, _ = measured("vision", tmp_path / "out.json", unit="images/s")
    rows = {(row["mode"], row["variant"]): row for row in found["rows"]}
    assert len(rows) == 2 * 3
    for mode in ("training", "inference"):
        einsum = rows[mode, "moe_einsum"]
        assert einsum["error"] < 1e-5 and einsum["over_ours"] > 0 and "times moe" in einsum["note"]
    # Every second block of both stages, of 2 images of 8 x 8 patches and then a quarter of them.
    layers = found["configurations"]["2 images"]["layers"]
    assert {label: each["tokens"] for label, each in layers.items()} == {
        "stages_0_1": 128,
        "stages_1_1": 32,
    }
    assert all(each["busiest_over_mean"] >= 1 for each in layers.values())
    assert any(each["dropped"] > 0 for each in layers.values())  # alike by both: see error


@pytest.mark.long
def test_the_store(tmp_path):
    path, plot = tmp_path / "out.json", tmp_path / "out.png"
    code, output = run("store", "--quick", "--json", path, "--plot", plot, "--folder", tmp_path / "model")
    assert code == 0, tail(output)
    found = json.loads(path.read_text())
    assert found["complete"] and str(tmp_path) not in path.read_text() and plot.stat().st_size > 1000
    decoded = [row for row in found["rows"] if "counters" in row]
    assert [row["variant"] for row in decoded] == ["resident", "pregated, cold", "pregated, cache 3"]
    for row in decoded:
        assert row["peak_bytes"] > 10e6 and row["rate"] > 0 and row["decoded"] == 6
        assert (row["variant"] == "resident") == (row["counters"] == {})
    assert decoded[2]["counters"]["peak_experts"] <= 3 + 2
    assert len(found["rows"]) == 3 + 2 * 6


def test_what_is_wrong_is_reported(tmp_path):
    path = tmp_path / "out.json"
    code, output = run("step", "--quick", "--json", path, before=NEGATED_GATE)
    assert code == 1, tail(output)
    assert "wrong: its output differs from moe's by" in output
    wrong = [row for row in json.loads(path.read_text())["rows"] if row["status"] == "wrong"]
    assert wrong and not any("seconds" in row for row in wrong)


@pytest.mark.parametrize(
    "module, words, reason",
    [
        ("step", ["--quick", "--top-k", 5], "--top-k is 5; give 1 to 4"),
        ("step", ["--rounds", 0], "--rounds is 0; give at least 1"),
        ("vision", ["--capacity", 0], "--capacity is 0.0; einsum has no other"),
        ("generate", ["--tokens", 0], "--tokens is 0; give at least 1"),
        ("generate_profile", ["--rounds", 0], "--rounds is 0; give at least 1"),
        ("generate_profile", ["--batches", 0], "--batches is 0; give at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(module, words, reason):
    code, output = run(module, *words)
    assert code == 2
    assert reason in " ".join(output.split())


def test_what_grows_with_ranks_is_counted(tmp_path):
    path = tmp_path / "scale.json"
    code, output = run("scale", "--quick", "--json", path)
    assert code == 0, tail(output)
    found = json.loads(path.read_text())
    rows = {(row["configuration"], row["variant"]): row for row in found["rows"]}
    assert found["complete"] and {row["status"] for row in rows.values()} == {"ok"}
    health_check = rows["health check", "8 ranks"]
    assert health_check["accusers"] == 0 and health_check["keys"] < 100
    assert rows["restart", "8 ranks"]["wrong"] == 0
    assert rows["look before a resume", "8 nodes"]["reads"] == 1
    assert rows["shards", "written by 8 ranks"]["writers"] == 8
    assert rows["shards", "read by one rank"]["opens"] == 4 * 2


@pytest.mark.long
def test_a_model_on_a_small_machine(tmp_path):
    path, plot = tmp_path / "out.json", tmp_path / "out.png"
    code, output = run(
        "small_machine", "--quick", "--folder", tmp_path, "--json", path, "--plot", plot, "--keep"
    )
    assert code == 0, tail(output)
    found = json.loads(path.read_text())
    forms = ("full, int4", "pruned, int8")
    titles = [f"{form}, others {dtype}" for form in forms for dtype in ("bf16", "int8")]
    assert [*found["configurations"]] == titles and plot.stat().st_size
    for cold, warm in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert cold["variant"] == "1 core, beam 1, cold" and warm["variant"] == "1 core, beam 1, warm"
        assert cold["read_bytes"] > 0 and warm["read_bytes"] == 0  # the cache holds all experts
        assert cold["experts"] == warm["experts"] > 0 and warm["hits"] > 0
        assert cold["seconds"] > 0 and cold["peak_bytes"] > 2**27
        assert sum(cold["parts"].values()) == pytest.approx(cold["seconds"])
    sizes = {name: facts["bytes"] for name, facts in found["configurations"].items()}
    assert sizes[titles[0]] < sizes[titles[2]]
    code, output = run("small_machine", "--quick", "--folder", tmp_path, "--model-dim", 128)
    assert code == 2 and "whose small-machine-full has a model of other sizes" in tail(output, 1)
    code, output = run("small_machine", "--quick", "--folder", tmp_path, "--dtype", "bf16")
    assert code == 0 and "written in 0 s" in output  # the models are used again
    assert not [*tmp_path.glob("small-machine-*")]


@pytest.mark.long
def test_saves_of_one_training(tmp_path):
    code, output = run("saves", "--quick", "--json", tmp_path / "out.json", "--folder", tmp_path)
    assert code == 0, tail(output)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    expected = [
        f"{form}, {who}" for form in ("full", "sharded", "background") for who in ("rank 0", "other ranks")
    ]
    assert [row["variant"] for row in rows] == expected
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows)
    assert [row["formula_bytes"] > 0 for row in rows] == [True, False, False, False, True, True]
    assert not list(tmp_path.glob("saves-*"))
