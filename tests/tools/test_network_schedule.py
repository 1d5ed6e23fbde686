"""`schedule`: what it prints, writes, draws and refuses."""

import builtins
import importlib
import json
from fractions import Fraction
from pathlib import Path

import pytest
from tool_in_process import refusal_of, tool

from fairseq_tutel.planning.network import find
from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.format import from_json

ROOT = Path(__file__).parents[2]


def ratios(text):
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return {row[1].strip(): row[2].strip() for row in rows}


def test_it_prints_the_optimum_its_cut_and_what_others_take():
    text = tool("schedule", "dgx_a100:2")
    assert "T* = 3/65 (bytes of a shard / GB/s), algbw 346.667 GB/s" in text
    assert "cut: 15 shard(s) leave all but gpu0.0 over 325 GB/s" in text
    assert "trees: k = 1 per root, 16 different ones, depth 2; U = 7/150 trees a GB/s" in text
    found = ratios(text)
    assert (found["forest"], found["ring"], found["turned rings"]) == ("1.011", "13.000", "1.625")
    assert found["linear program"] == "0.32"


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (
            ("all_reduce", "--trees", 2, "--slices", 3),
            "optimum of a reduce-scatter and an all-gather: T* = 3 (",
        ),
        (("reduce", "--root", 2, "--bytes", 300_000), "optimum: T* = 1/2 ("),
    ],
)
def test_its_plan_and_its_network_are_files_that_can_be_used(tmp_path, words, least):
    files = {flag: tmp_path / f"{flag}.json" for flag in ("--output", "--network")}
    flags = [word for pair in files.items() for word in pair]
    text = tool("schedule", "ring:4", "--collective", *words, *flags)
    assert least in text and text.endswith(f"wrote {files['--network']}\n")
    plan = from_json(json.loads(files["--output"].read_text()))
    assert (plan.collective, plan.ranks) == (words[0], 4)
    # Of one shard two chunks in each of three slices, of --bytes one.
    assert plan.chunks == {"all_reduce": 24, "reduce": 1}[words[0]]
    assert plan.network == find(str(files["--network"])).digest == find("ring:4").digest
    assert check(plan).depth > 0 and Fraction(plan.cut) > 0
    again = tool("schedule", files["--network"], "--collective", *words)
    assert again == text.partition("wrote")[0]


def test_the_picture_shows_links_cut_and_trees(tmp_path):
    red = {}
    for collective, ending in (("broadcast", "svg"), ("reduce", "svg"), ("all_gather", "png")):
        path = tmp_path / f"{collective}.{ending}"
        tool("schedule", "star:3", "--collective", collective, "--plot", path)
        content = path.read_bytes()
        assert 8_000 < len(content) < 150_000
        red[collective] = content.count(b"#ff0000")
    # A line and its arrow head.
    assert red["broadcast"] == red["reduce"] > 0
    assert content.startswith(b"\x89PNG")


def test_without_scipy_it_says_what_the_linear_program_needs(monkeypatch):
    import_it = builtins.__import__

    def import_all_but_it(name, *rest):
        if name.partition(".")[0] == "scipy":
            raise ModuleNotFoundError(f"No module named {name!r}", name="scipy")
        return import_it(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_all_but_it)
    text = tool("schedule", "ring:4")
    assert text.endswith(
        "the linear program needs scipy, which is not installed; pip install 'fairseq-tutel[plan]'.\n"
    )
    assert "linear program" not in ratios(text) and ratios(text)["linear"] == "3"


REFUSED = {
    "topology": (("dgx",), "dgx is no network; give a FILE.json or one of dgx_a100:BOXES, "),
    "collective": (
        ("ring:4", "--collective", "all_to_all"),
        "--collective is all_to_all; give one of all_gather, reduce_scatter, all_reduce, ",
    ),
    "trees": (("ring:4", "--trees", 0), "--trees is 0; give a number of at least 1."),
    "slices": (("ring:4", "--slices", 0), "--slices is 0; give a number of at least 1."),
    "more trees": (("ring:4", "--trees", 99999999), "--trees is 99999999; give at most "),
    "more slices": (("ring:4", "--slices", 9999), "--slices is 9999; give at most "),
    "kind": (("ring:4", "--output", "x.xml"), "--output is x.xml; end it in .json."),
    "one file": (
        ("ring:4", "--output", "x.json", "--network", "x.json"),
        "--output and --network are both x.json; give two files.",
    ),
    "bytes": (("ring:4", "--bytes", -1), "--bytes is -1; give a number of at least 1."),
    "root": (
        ("ring:4", "--collective", "reduce", "--root", 4),
        "--root is 4; give one of the ranks 0 to 3.",
    ),
    "no root": (
        ("ring:4", "--root", 0),
        "--root is 0, but all_gather has no root; leave it out.",
    ),
    "plot": (("ring:4", "--plot", "x.txt"), "--plot is x.txt; end it in one of .png, .svg, .pdf."),
    "output": (
        ("ring:4", "--output", "/nowhere/x.json"),
        "--output is /nowhere/x.json; give the name of a file in an existing folder.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_in_one_sentence(case):
    words, sentence = REFUSED[case]
    assert refusal_of("schedule", *words).startswith(sentence)


def test_the_page_s_rows_are_what_the_benchmark_finds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    row_of = importlib.import_module("benchmarks.schedule").row_of
    stored = json.loads((ROOT / "benchmarks" / "results" / "schedule.json").read_text())["rows"]
    known = {row["network"]: row for row in stored}
    for name in ("dgx_a100:2", "hypercube:3"):
        row = json.loads(json.dumps(row_of(name, 1)))
        for made in ("few", "optimal"):
            assert row[made].pop("seconds") > 0 < known[name][made].pop("seconds") < 10
        assert row == known[name]
    assert all(row["optimal"].get("seconds", 0) < 10 for row in stored)


def test_many_gpus_get_lines_of_progress_and_too_many_are_refused(monkeypatch, capsys):
    schedule = importlib.import_module("fairseq_tutel.tools.schedule")
    text = tool("schedule", "star:4")
    assert not capsys.readouterr().err
    monkeypatch.setattr(schedule, "QUICK", 3)
    monkeypatch.setattr(schedule, "EVERY", 0)
    assert tool("schedule", "star:4") == text
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "schedule: replaced the links of 1 of 1 switches"
    assert lines[-1] == "schedule: 4 trees have grown, 0 have not"
    sentence = "ring:257 has 257 GPUs; give a network of at most 256."
    assert refusal_of("schedule", "ring:257") == sentence
