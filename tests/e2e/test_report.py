"""`report` over real training runs: a MoE model on two ranks and a dense one."""

import base64
import contextlib
import json
import re
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from cli import fairseq
from matplotlib.image import imread
from models import lm_args
from report_page import HREF, page_in, words_of
from tool_in_process import tool

from fairseq_tutel.tools.report import figures
from fairseq_tutel.tools.report.sections import curve_sections, expert_sections, layer_section
from fairseq_tutel.tools.training_log import join, read_log


def report(*words):
    return tool("report", *words)


@pytest.fixture(scope="module")
def runs(lm_data, tmp_path_factory):
    """The save-dirs of a dense run, and of a MoE run on two ranks that drops tokens."""
    folder = tmp_path_factory.mktemp("runs")
    dense, moe = folder / "dense", folder / "moe"
    for save_dir in (dense, moe):
        save_dir.mkdir()
    moe_flags = ("--moe-capacity-factor", 1, "--record-a2a-perf-stats")
    words = lm_args(lm_data, moe, *moe_flags, "--log-file", moe / "train.log", updates=8)
    fairseq("train", *words, ranks=2)
    stock = (
        "--task", "language_modeling", "--arch", "transformer_lm", "--criterion", "cross_entropy",
        "--log-file", dense / "train.log", "--validate-interval-updates", 4,
    )  # fmt: skip
    words = lm_args(lm_data, dense, *stock, updates=8)
    at = words.index("--moe-freq")
    fairseq("train", *words[:at], *words[at + 4 :])
    return dense, moe


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    """The page of both runs, where it is written without a name for it."""
    folder = tmp_path_factory.mktemp("page")
    with contextlib.chdir(folder):
        assert report(*runs) == "wrote report.html\n"
    return page_in(folder / "report.html")


def test_the_page_needs_nothing_but_itself(page):
    for address in page.addresses:
        assert address.startswith(("data:", "#")), address
    assert {a.removeprefix("#") for a in page.addresses if a.startswith("#")} <= set(page.ids)
    for _, _, svg in page.images:
        for element in svg.iter():
            assert element.get(HREF, "#").startswith(("#", "data:"))
        assert not re.search(r"url\((?!#)", ElementTree.tostring(svg, encoding="unicode"))


def test_the_page_is_accessible(page):
    assert len(page.ids) == len(set(page.ids))
    assert page.texts["title"] == page.texts["h1"] == ["Training report: dense, moe"]
    assert page.texts["caption"] == ["Summary"]
    assert all(len(alt) > 30 for _, alt, _ in page.images)
    titles = page.texts["strong"]
    assert len(titles) == len(page.images)


def test_every_section_has_its_pictures_and_names_both_runs(page):
    found = {name: len(page.pictures(name)) for name in page.ids if page.pictures(name)}
    assert found == {
        "loss": 6, "experts": 7, "layers": 5, "load": 5, "dropped": 3, "speed": 2, "optimizer": 3,
    }  # fmt: skip
    curves = {"dense, training", "dense, valid", "moe, training", "moe, valid"}
    (_, against_updates), *_ = page.pictures("loss")
    assert words_of(against_updates) >= {*curves, "updates", "perplexity"}
    assert words_of(page.pictures("loss")[3][1]) >= {*curves, "training time (s)"}
    assert words_of(page.pictures("speed")[0][1]) >= {"dense", "moe", "tokens per second"}


def test_the_pictures_of_experts_are_of_the_moe_run_alone(page):
    balance, entropy, weights, by_choice, dead, dropped, busiest = page.pictures("experts")
    for _, svg in (balance, busiest, dead, dropped):
        assert words_of(svg) >= {"moe, training", "moe, valid"}
    assert words_of(entropy[1]) >= {"ln 4 = 1.39", "entropy (nats)"}
    assert words_of(weights[1]) >= {"moe, choice 1", "moe, choice 2", "mean weight"}
    assert words_of(by_choice[1]) >= {"moe, choice 1", "moe, choice 2", "dropped (%)"}
    for _, svg in page.pictures("experts"):
        assert not any("dense" in word for word in words_of(svg))
    (exchanges,) = page.pictures("speed")[1:]
    assert "moe, cpu clock" in words_of(exchanges[1])


def test_every_moe_layer_has_a_heat_map_of_training_and_validation(page):
    colours, *maps = page.pictures("load")
    assert words_of(colours[1]) >= {"≤ ¼", "½", "1", "2", "≥ 4"}
    starts = [alt[: alt.index(":")] for alt, _ in maps]
    assert starts == [f"moe, {what}, decoder layer {i}" for what in ("training", "valid") for i in (0, 1)]
    for _, svg in maps:
        assert words_of(svg) >= {"updates", "expert", "0", "3"}
        assert any(element.tag.endswith("image") for element in svg.iter())


def test_dropped_shares_have_heat_maps_where_something_was_dropped(page):
    colours, *maps = page.pictures("dropped")
    assert words_of(colours[1]) >= {"0", "1 %", "50 %", "100 %"}
    starts = [alt[: alt.index(":")] for alt, _ in maps]
    assert starts == [f"moe, training, decoder layer {i}" for i in (0, 1)]  # evaluation is dropless


def test_every_quantity_has_a_line_for_each_layer(page, runs):
    pictures = page.pictures("layers")
    assert [alt[: alt.index(" by layer")] for alt, _ in pictures] == [
        f"moe, {quantity}"
        for quantity in (
            "gate entropy", "weights of choice 1", "weights of choice 2", "dropped share",
            "busiest expert",
        )
    ]  # fmt: skip
    for _, svg in pictures:
        assert words_of(svg) >= {"decoder layer 0", "decoder layer 1", "updates"}
    lines = (runs[1] / "train.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
    first, second = [r for r in records if "wps" in r][-1]["moe_layers_entropy"]
    assert pictures[0][0].endswith(f"at update 8 decoder layer 0 {first:g}, decoder layer 1 {second:g}.")


def run_of(records):
    return {"images": join(read_log(map(json.dumps, records)))}


def pictures_of(runs):
    return [p for section in curve_sections(runs) for of in section.groups.values() for p in of]


def test_many_layers_are_a_map_and_a_dropless_run_has_no_dropped_share():
    layers = 9
    values = {
        "moe_layers_entropy": [i / layers for i in range(layers)],
        "moe_layers_dropped": [0.0] * layers,
        "moe_layers_novelty": [0.5] * layers,
        **{f"moe_{what}_decoder_{i}": [1.0 - (what == "dropped")] * 2 for i in range(layers)
           for what in ("load", "dropped")},
    }  # fmt: skip
    values |= {"moe_dropped": "0", "overflow_expert1": "0", "entropy_gating": "1.5"}
    runs = run_of([{"epoch": 1, "num_updates": u, **values} for u in (10, 20)])
    picture, unknown = layer_section(runs).groups["images"]
    assert unknown.title == "novelty"
    svg = ElementTree.fromstring(picture.svg)
    assert words_of(svg) >= {"MoE layer", "entropy (nats)", "updates"}
    assert any(element.tag.endswith("image") for element in svg.iter())
    assert "decoder layer 8 0.888889." in picture.alt
    load, dropped = expert_sections(runs)
    assert sum(map(len, load.groups.values())) == 1 + layers
    assert not dropped.groups
    curves = [picture.title for picture in curve_sections(runs)[1].groups[""]]
    assert curves == ["Gate entropy against updates"]


def test_accuracies_are_drawn_where_there_are_some():
    values = {"valid_accuracy": "50", "valid_top5_accuracy": "90"}
    pictures = pictures_of(run_of([{**values, "valid_num_updates": u} for u in "36"]))
    titles = [picture.title for picture in pictures]
    accuracy = ["Accuracy against updates", "Accuracy of five against updates"]
    assert titles[:2] == accuracy and "Perplexity against updates" not in titles


def test_a_run_of_images_names_its_unit():
    values = {"wps": "80", "wpb": "16", "bsz": "16"}
    (speed,) = pictures_of(run_of([{"epoch": 1, "num_updates": u, **values} for u in (3, 6)]))
    assert "images per second" in words_of(ElementTree.fromstring(speed.svg))


def test_the_table_holds_the_numbers_of_the_log(page, runs):
    rows = [page.cells[:9], page.cells[9:]]
    for name, save_dir, row in zip(("dense", "moe"), runs, rows, strict=True):
        lines = (save_dir / "train.log").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
        ppl = {r["valid_num_updates"]: float(r["valid_ppl"]) for r in records if "valid_ppl" in r}
        best = min(ppl, key=ppl.get)
        assert row[:2] == [name, "8"]
        assert row[3] == f"{ppl['8']:.2f}"
        assert row[4] == f"{ppl[best]:.2f} at update {best}"
    assert [row[7:] for row in rows] == [["none", "1"], ["2 × 4", "2"]]  # noqa: RUF001


def test_the_same_numbers_give_the_same_page(runs, tmp_path):
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    for output in (first, second):
        report(runs[0] / "train.log", "--output", output)
    assert first.read_bytes() == second.read_bytes()
    page = page_in(first)
    assert {name for name, _, _ in page.images} == {"loss", "speed", "optimizer"}
    assert "Experts" not in page.texts["h2"]


def test_a_broken_log_and_a_hostile_name_are_no_obstacle(runs, tmp_path):
    log = tmp_path / "train.log"
    text = (runs[1] / "train.log").read_text()
    broken = re.sub(r'"gnorm": "[\d.]+"', '"gnorm": "nan"', text).replace('"loss": "', '"loss": "inf', 1)
    log.write_text(text + broken + '{"epoch": 1, "update": 0.9, "lo')
    name = "<script>alert('a & b')</script> $x_{ \"quoted\""
    report(log, "--name", name, "--output", tmp_path / "page.html")
    page = page_in(tmp_path / "page.html")
    assert page.texts["title"] == [f"Training report: {name}"]
    assert "script" not in page.texts
    notes = " ".join(page.texts["li"])
    assert "Resumed: a new process logs from update 1 on" in notes
    assert "train_inner gnorm is nan or infinite in 8 record(s), first at update 1" in notes
    assert "1 damaged line(s)" in notes


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere does not exist; give a log of fairseq-train, or its --save-dir."),
        (["empty"], "empty has no training record: no record of fairseq in 1 file(s) "
                    "named *.log, *.json, *.txt; train with "
                    "--log-format json --log-file empty/train.log."),
        (["empty/a.txt"], "empty/a.txt has no training record"),
        (["run", "run"], "two runs are named run; give different names with --name, or remove"),
        (
            ["run", "--output", "empty/a.txt"],
            "--output empty/a.txt exists; give another name, or add --overwrite.",
        ),
        (["run", "--name", "a", "--name", "b"], "--name is given 2 time(s) for 1 run(s)"),
        (["run", "--output", "empty"], "--output is empty; give the name of a file in an existing folder."),
        (["run", "--output", "no/page.html"], "--output is no/page.html; give the name of a file"),
    ],
)  # fmt: skip
def test_bad_input_ends_with_one_sentence(runs, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("no record\n")
    (tmp_path / "run").symlink_to(runs[0])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        report(*arguments)
    assert str(ended.value).startswith(f"error: {message}")
    assert not list(tmp_path.rglob("*.html"))


def colours_of(values, scale):
    """Return the red, green and blue of every row of a heat map, from its middle column."""
    svg = ElementTree.fromstring(figures.heat_map([10, 20], [values] * 2, scale).encode())
    (image,) = [element for element in svg.iter() if element.tag.endswith("image")]
    pixels = imread(BytesIO(base64.b64decode(image.get(HREF).split(",", 1)[1])), format="png")
    if "scale(1 -1)" in image.get("transform"):
        pixels = pixels[::-1]
    height, width = pixels.shape[:2]
    rows = len(values)
    return [pixels[int(height * (row + 0.5) / rows), width // 2, :3] for row in range(rows)]


def test_the_colours_of_a_heat_map_tell_the_load():
    even, dead, crowded, last = colours_of([1.0, 0.0, 4.0, 1.0], figures.LOAD_SCALE)
    assert even.min() > 0.9
    assert np.array_equal(even, last)
    assert dead[2] > dead[0] > dead[1]  # violet
    assert crowded[0] > crowded[1] > crowded[2]  # orange
    assert dead.max() < 0.4
    assert crowded.min() < 0.1


def test_the_colours_of_a_heat_map_tell_what_is_dropped():
    none, little, half, everything = colours_of([0, 0.03, 0.5, 1], figures.DROPPED_SCALE)
    assert none.min() > 0.99
    assert everything.max() < 0.01
    assert none.sum() > little.sum() + 0.2 > half.sum() + 0.4
    assert little[0] > little[1] > little[2]  # orange
