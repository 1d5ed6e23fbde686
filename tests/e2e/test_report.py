"""Tests of the page that `fairseq-tutel report` writes about a dense run and a MoE run on two ranks."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from cli import ROOT, fairseq
from models import lm_args
from report_page import HREF, page_in, words_of
from tool_in_process import refusal_of, tool

from fairseq_tutel.tools.report import figures
from fairseq_tutel.tools.report.sections import curve_sections
from fairseq_tutel.tools.training_log import join, read_log

DENSE = ROOT / "docs" / "report" / "dense.json"


@pytest.fixture(scope="module")
def moe(lm_data, tmp_path_factory):
    """The --save-dir of a MoE run that drops assignments, on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "moe"
    folder.mkdir()
    flags = ("--moe-capacity-factor", 1, "--record-a2a-perf-stats", "--log-file", folder / "train.log")
    fairseq("train", *lm_args(lm_data, folder, *flags, updates=8), ranks=2)
    return folder


@pytest.fixture(scope="module")
def page(moe, tmp_path_factory):
    output = tmp_path_factory.mktemp("page") / "report.html"
    assert tool("report", DENSE, moe, "--name", "dense", "--name", "moe", "--output", output) == (
        f"wrote {output}\n"
    )
    return page_in(output)


def test_the_report_is_accessible_and_needs_no_other_file(page):
    for address in page.addresses:
        assert address.startswith(("data:", "#")), address
    assert {a.removeprefix("#") for a in page.addresses if a.startswith("#")} <= set(page.ids)
    for _, _, svg in page.images:
        assert all(element.get(HREF, "#").startswith(("#", "data:")) for element in svg.iter())
        assert not re.search(r"url\((?!#)", ElementTree.tostring(svg, encoding="unicode"))
    assert len(page.ids) == len(set(page.ids))
    assert page.texts["title"] == page.texts["h1"] == ["Training report: dense, moe"]
    assert all(len(alt) > 30 for _, alt, _ in page.images)
    assert len(page.texts["strong"]) == len(page.images)


def test_every_section_of_the_report_has_the_expected_pictures(page):
    found = {name: len(page.pictures(name)) for name in page.ids if page.pictures(name)}
    assert found == {
        "loss": 6, "experts": 7, "load": 4, "speed": 2, "optimizer": 3,
    }  # fmt: skip
    curves = {"dense, training", "dense, valid", "moe, training", "moe, valid"}
    assert words_of(page.pictures("loss")[0][1]) >= {*curves, "updates", "perplexity"}
    assert words_of(page.pictures("loss")[3][1]) >= {*curves, "training time (s)"}
    assert words_of(page.pictures("speed")[0][1]) >= {"dense", "moe", "tokens or images per second"}
    assert "moe, cpu clock" in words_of(page.pictures("speed")[1][1])


def test_the_report_has_charts_of_expert_metrics_and_maps_of_expert_loads(page):
    balance, entropy, weights, by_choice, dead, dropped, busiest = page.pictures("experts")
    for _, svg in (balance, busiest, dead, dropped):
        assert words_of(svg) >= {"moe, training", "moe, valid"}
    assert words_of(entropy[1]) >= {"moe, valid", "entropy (nats)"}
    assert words_of(weights[1]) >= {"moe, choice 1", "moe, choice 2", "mean weight"}
    assert words_of(by_choice[1]) >= {"moe, choice 1", "moe, choice 2", "dropped (%)"}
    maps = [alt[: alt.index(":")] for alt, _ in page.pictures("load") if alt.startswith("moe")]
    assert maps == [f"moe, {what}, decoder layer {i}" for what in ("training", "valid") for i in (0, 1)]
    assert words_of(page.pictures("load")[-1][1]) >= {"updates", "expert", "0", "3", "≤ ¼", "≥ 4"}


def test_the_table_of_the_report_has_the_values_of_the_log(page, moe):
    row = page.cells[9:]
    lines = (moe / "train.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
    ppl = {r["valid_num_updates"]: float(r["valid_ppl"]) for r in records if "valid_ppl" in r}
    assert row[:2] == ["moe", "8"] and row[3] == f"{ppl['8']:.2f}"
    assert row[4] == f"{min(ppl.values()):.2f} at update {min(ppl, key=ppl.get)}"
    assert row[7:] == ["2 × 4", "2"]  # noqa: RUF001


def run_of(records):
    return {"images": join(read_log(map(json.dumps, records)))}


def test_the_report_of_a_dropless_run_has_no_chart_of_dropped_assignments():
    values = {
        "moe_dropped": "0", "overflow_expert1": "0", "entropy_gating": "1.5",
    }  # fmt: skip
    runs = run_of([{"epoch": 1, "num_updates": u, **values} for u in (10, 20)])
    curves = [picture.title for picture in curve_sections(runs)[1].groups[""]]
    assert curves == ["Gate entropy against updates"]


def test_the_report_of_an_image_model_has_accuracy_instead_of_perplexity():
    values = {"valid_accuracy": "50", "valid_top5_accuracy": "90"}
    loss, *_ = curve_sections(run_of([{**values, "valid_num_updates": u} for u in "36"]))
    titles = [picture.title for picture in loss.groups[""]]
    assert titles == ["Accuracy against updates", "Accuracy of five against updates"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere does not exist; give a log of fairseq-train, or its --save-dir."),
        (["a.txt"], "a.txt has no training record; train with --log-format json --log-file ./train.log."),
        ([DENSE, DENSE], "two runs are named "),
        ([DENSE, "--output", "a.txt"], "--output a.txt exists; give another name, or add --overwrite."),
        ([DENSE, "--name", "a", "--name", "b"], "--name is given 2 time(s) for 1 run(s)"),
    ],
)
def test_report_refuses_bad_input_with_one_sentence(tmp_path, monkeypatch, words, sentence):
    (tmp_path / "a.txt").write_text("no record\n")
    monkeypatch.chdir(tmp_path)
    assert refusal_of("report", *words).startswith(sentence)
    assert not list(tmp_path.rglob("*.html"))


def test_load_maps_use_violet_for_low_load_and_orange_for_high_load():
    loads = figures.LOAD_NORM(np.array([0.25, 1.0, 4.0]))
    dead, even, crowded = figures.LOAD_COLORS(loads)[:, :3]
    assert even.min() > 0.9
    assert dead[2] > dead[0] > dead[1]  # violet
    assert crowded[0] > crowded[1] > crowded[2]  # orange
