"""The tables of docs/performance.md match the files in benchmarks/results."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tabulate import tabulate

import make_performance
import page

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "performance.md").read_text()
TIMES = {
    "seconds": 0.02, "ratio": 1.0, "ratio_p20": 1.0, "ratio_p80": 1.0,
    "rate": 4e9, "rate_unit": "FLOP/s",
}  # fmt: skip
CPU = {"device": "CPU, AVX2", "cores": 16, "dtype": "float32", "torch": "2.11.0", "triton": None,
       "load_before": 0.1}  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    """Return a function from a name to the benchmark's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        layer = importlib.import_module("benchmarks.layer")
        patch.setattr(layer, "keep_freed_memory", lambda: False)
        yield lambda name: importlib.import_module(f"benchmarks.{name}")


def written(benchmark, path, name, machine, rows, configurations, base="dense", **options):
    """Write a file as a benchmark does, one row after the other."""
    made = benchmark("output").Report(name, base, machine, {"quick": False, **options}, path)
    for configuration, row in rows:
        made.add(configuration, configurations.get(configuration, {}), [row])
    return made


def lines(text, name):
    """Return a table of the page: a dictionary by header for each line."""
    inside = text.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in inside.splitlines()]
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]


def test_the_page_is_up_to_date():
    assert make_performance.filled_in(TEXT) == TEXT


def test_what_has_no_file_is_not_measured_yet(tmp_path):
    text = make_performance.filled_in(TEXT, tmp_path)
    places = text.count("<!-- end -->")
    assert text.count("Not measured yet: `") == places == 15


def test_steps_and_texts_become_lines(benchmark, tmp_path, capsys):
    moe = {**TIMES, "variant": "moe", "status": "ok", "ratio": 1.08}
    dense = {**TIMES, "variant": "dense", "status": "ok"}
    wrong = {"variant": "moe_einsum", "status": "wrong", "reason": "its output | differs"}
    entry = {"name": "aten::mm", "self_ms": 12.34, "share": 0.5, "calls": 3}
    written(
        benchmark, tmp_path / "step_cpu.json", "step", CPU,
        [("lm k1", dense), ("lm k1", moe), ("lm k1", wrong)],
        {"lm k1": {"profile": {"dense": [entry], "moe": [{**entry, "self_ms": 56.78}]}}},
        threads=2,
    ).finish(None)  # fmt: skip
    written(
        benchmark, tmp_path / "generate_cpu.json", "generate", CPU,
        [("batch 8", {**dense, "rate": 321.0}), ("batch 8", moe)], {}, threads=1,
    )  # fmt: skip
    # Others' results in the same folder.
    (tmp_path / "parts.json").write_text("{}")
    text = make_performance.filled_in(TEXT, tmp_path)

    (step,) = lines(text, "step")
    assert (step["on"], step["dense, s"], step["moe"]) == ("2 threads", "0.02", "1.080 (1.000..1.000)")
    # No variant is a column for being wrong alone, nor is it passed over.
    assert "moe_einsum" not in step
    assert "| moe_einsum | wrong: its output \\| differs" in " ".join(text.split())
    (profile,) = lines(text, "profile")
    assert (profile["dense: ms"], profile["moe: ms"], profile["moe: share"]) == ("12.3", "56.8", "50.0%")
    (generated,) = lines(text, "generate")
    assert generated["dense, tokens/s"] == "321"
    assert "Not measured yet" in text.split("<!-- layer cpu -->")[1][:20]
    cut_short = {line["file"] for line in lines(text, "runs") if "cut short" in line["file"]}
    assert cut_short == {"`generate_cpu`, cut short"}


def test_compiled_kernels_become_their_extremes(tmp_path):
    rows = [
        ("ffn_up/bf16/relu", "sm_90", 168, 0, 0, 131072),
        ("gather_sum/bf16", "sm_90", 32, 0, 8, 0),
        ("ffn_up/bf16/relu", "gfx942", 200, 40, 0, 65536),
    ]
    headers = ("kernel", "target", "registers", "scalar registers", "spilled", "shared bytes")
    (tmp_path / "compiled.md").write_text(tabulate(rows, headers, tablefmt="github") + "\n")
    hopper, amd = lines(make_performance.filled_in(TEXT, tmp_path), "compiled")
    assert (hopper["target"], hopper["kernels"]) == ("sm_90", "2")
    assert hopper["most registers"] == "168 (`ffn_up/bf16/relu`)"
    assert hopper["with spilled registers"] == "`gather_sum/bf16`"
    assert amd["with spilled registers"] == "none"


@pytest.mark.parametrize("places, count", [("", 0), (2 * "<!-- x -->\n<!-- end -->\n", 2)])
def test_a_table_needs_one_place(places, count):
    with pytest.raises(ValueError, match=f"a.md has {count} places for the table 'x'; it needs one"):
        page.filled(places, "a.md", {"x": "new"})
    text = "<!-- x -->\nold\n<!-- end -->\n<!-- xy -->\nother\n<!-- end -->\n"
    assert page.filled(text, "a.md", {"x": r"\1"}) == text.replace("old", r"\1")


def test_check_says_what_to_run_and_changes_nothing(tmp_path):
    for name in ("page.py", "make_performance.py", "performance.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / name)
    script, text = tmp_path / "make_performance.py", tmp_path / "performance.md"
    old = text.read_text().replace("<!-- end -->", "more\n<!-- end -->", 1)
    text.write_text(old)

    def run(*words):
        return subprocess.run([sys.executable, script, *words], capture_output=True, text=True)

    checked = run("--check")
    assert checked.returncode == 1 and text.read_text() == old
    assert checked.stderr == f"performance.md is out of date; run python {script}\n"
    assert run().returncode == 0 and "more\n<!-- end" not in text.read_text()
    assert run("--check").returncode == 0
