"""The reader of training logs, in every form in which fairseq writes them, and the report's summary."""

# ruff: noqa: RUF001 - dashes and crosses are meant

import json
import logging
import math
import os

import pytest
from fairseq.logging.progress_bar import progress_bar

from fairseq_tutel.tools import training_log
from fairseq_tutel.tools.report.page import duration, summary
from fairseq_tutel.tools.training_log import Record, default_names, find_log, join, read_log


def inner(update, loss="3.5", wall=None, **stats):
    """Return a record of the training since the last one, as fairseq writes it."""
    stats = {"epoch": 1, "update": 0.1, "loss": loss, "num_updates": str(update), **stats}
    return json.dumps(stats if wall is None else {**stats, "wall": str(wall)})


def valid(update, ppl="9.5", subset="valid"):
    return json.dumps({"epoch": 1, f"{subset}_ppl": ppl, f"{subset}_num_updates": str(update)})


def run_of(*lines):
    return join(read_log(lines))


def updates(run, tag="train_inner"):
    return [record.update for record in run.records[tag]]


def seconds(run):
    return [record.seconds for record in run.training]


@pytest.mark.parametrize(
    "form",
    ["{}\n", "2026-01-02 03:04:05 | INFO | TAG | {}\n", "[2026-01-02 03:04:05,678][TAG][INFO] - {}\n"],
)
def test_a_record_reads_alike_in_every_form(form):
    log = read_log([form.format(inner(10, load=[0.5, 1.5])), form.format(valid(10))])
    assert log.entries == [
        Record("train_inner", 10, {"epoch": 1, "update": 0.1, "loss": 3.5, "num_updates": 10},
              {"load": [0.5, 1.5]}),
        Record("valid", 10, {"epoch": 1, "ppl": 9.5, "num_updates": 10}),
    ]  # fmt: skip


@pytest.mark.parametrize("prefix", ("", "2026-01-02 03:04:05 | INFO | valid | "))
def test_fairseq_s_simple_format_reads_as_its_json_format(prefix, caplog):
    caplog.set_level(logging.INFO)
    found = {}
    for form in ("simple", "json"):
        bar = progress_bar([0] * 50, form, log_interval=1, epoch=3)
        next(iter(bar))
        stats = {"loss": 2.5, "ppl": float("nan"), "moe_load_decoder_1": [0.5, 1.5], "num_updates": 20}
        caplog.clear()
        bar.log(stats, tag="train_inner", step=20)
        bar.print(stats, tag="train", step=20)
        valid = progress_bar([0], form, epoch=3, prefix="valid on 'other' subset")
        valid.print({"loss": 3.5, "best_loss": 1.5, "num_updates": 20}, tag="other", step=20)
        found[form] = read_log(f"{prefix}{record.getMessage()}\n" for record in caplog.records).entries
    for entry in found["json"]:
        entry.values.pop("epoch"), entry.values.pop("update", None)
    assert [entry.tag for entry in found["simple"]] == ["train_inner", "train", "other"]
    assert repr(found["simple"]) == repr(found["json"])


def test_the_wall_of_an_epoch_s_record_is_not_its_train_wall():
    stats = {"train_num_updates": "7", "train_train_wall": "3", "train_wall": "5"}
    (record,) = run_of(json.dumps(stats)).training
    assert record.values == {"num_updates": 7, "train_wall": 3, "wall": 5}
    assert record.seconds == 5


def test_other_lines_are_passed_over():
    lines = [
        "{'_name': None, 'eval_bleu_args': '{\"beam\": 2}'}",
        'setting {"beam": 4}', '{"num_updates": "many"}', '{"valid_ppl": "3.1"}', "[1, 2]", "",
    ]  # fmt: skip
    log = read_log(lines)
    assert not log.entries
    assert not log.damaged


def test_the_copies_of_a_line_are_one_record_and_no_restart():
    nan = inner(20, loss="nan", wall=9)
    run = run_of(*[inner(10, wall=5)] * 2, *[valid(10)] * 3, *[nan] * 3)
    assert updates(run) == [10, 20]
    assert seconds(run) == [5, 9]
    (note,) = run.notes
    assert "nan or infinite in 1 record(s)" in note


def test_a_cut_off_line_is_left_out_and_noted():
    run = run_of(inner(10), inner(20)[:40], inner(30), inner(40)[:-1])
    assert updates(run) == [10, 30]
    assert run.notes == ["2 damaged line(s) are left out, the first one is line 2."]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", math.nan, math.inf])
def test_what_is_not_finite_is_kept_and_noted(value):
    run = run_of(inner(10), inner(20, loss=value), inner(30, loss=value, gnorm="1"))
    assert not math.isfinite(run.training[1].values["loss"])
    (note,) = run.notes
    assert note.startswith("train_inner loss is nan or infinite in 2 record(s), first at update 20")


def test_nan_in_a_list_is_noted_and_text_is_no_number():
    run = run_of(inner(10, moe_load_decoder_0=[1.0, math.nan, None], mood="good", empty=None))
    (record,) = run.training
    assert record.values.keys() == {"epoch", "update", "loss", "num_updates"}
    load = record.lists["moe_load_decoder_0"]
    assert load[0] == 1
    assert math.isnan(load[1]) and math.isnan(load[2])
    assert "moe_load_decoder_0 is nan or infinite in 1 record(s)" in run.notes[0]


def test_the_later_record_of_an_update_wins():
    run = run_of(inner(10, loss="4"), inner(20, loss="3"), inner(20, loss="2"))
    assert [record.values["loss"] for record in run.training] == [4, 2]


def test_a_resumed_process_replaces_what_it_repeats_and_its_time_adds_up():
    run = run_of(
        "training on 2 devices (GPUs/TPUs)", inner(10, wall=6), inner(20, wall=9), valid(20),
        inner(30, wall=14),
        "training on 4 devices (GPUs/TPUs)", inner(20, loss="1", wall=5), inner(40, wall=25),
    )  # fmt: skip
    assert updates(run) == [10, 20, 40]
    assert seconds(run) == [6, 14 + 5, 14 + 25]
    assert "valid" not in run.records  # of the weights that were lost
    assert run.training[1].values["loss"] == 1
    assert run.ranks == [2, 4]
    assert run.notes == [
        "Resumed: a new process logs from update 20 on, "
        "and 3 earlier records of these updates are left out."
    ]


@pytest.mark.parametrize(
    "between, first_wall",
    [(["training on 1 devices (GPUs/TPUs)"], 50), ([], 3)],
    ids=["it says so", "wall goes back"],
)
def test_a_process_that_repeats_nothing_still_begins_anew(between, first_wall):
    run = run_of(inner(10, wall=6), *between, inner(20, wall=first_wall))
    assert updates(run) == [10, 20]
    assert seconds(run) == [6, 6 + first_wall]
    assert run.notes == ["Resumed: a new process logs from update 20 on."]


def test_a_clock_that_stands_still_is_told_by_the_speed():
    """As fairseq's does from a resume in the middle of an epoch on."""
    run = run_of(
        "training on 1 devices (GPUs/TPUs)", inner(10, wall=6), inner(20, wall=9),
        "training on 1 devices (GPUs/TPUs)", inner(30, wall=0, ups="2"), inner(40, wall=0, ups="0.5"),
    )  # fmt: skip
    assert seconds(run) == [6, 9, 9 + 10 / 2, 9 + 10 / 2 + 10 / 0.5]


def test_a_validation_is_dated_by_the_last_known_time():
    run = run_of(valid(5), inner(10, wall=6), valid(12))
    first, second = run.records["valid"]
    assert math.isnan(first.seconds)
    assert second.seconds == 6


def test_training_falls_back_on_the_records_of_epochs():
    run = run_of(
        json.dumps({"train_loss": "4", "train_num_updates": "59"}), valid(59), valid(59, subset="test")
    )
    assert updates(run, "train") == [59]
    assert [record.update for record in run.training] == [59]
    assert list(run.subsets) == ["valid", "test"]


def test_the_summary_of_a_run():
    load = {
        "moe_load_encoder_1": [1.0] * 8,
        "moe_load_decoder_0": [1.0] * 4,
        "moe_load_decoder_1": [1.0] * 4,
    }
    (row,) = summary({"one": run_of(
        "training on 2 devices (GPUs/TPUs)",
        inner(1000, wps="1", ppl="70", wall="30"), valid(1000, ppl="20.126"),
        inner(2000, wps="500", ppl="60", **load), inner(3000, wps="700", ppl="50.5", wall="3661"),
        valid(3000, ppl="21"), inner(3000, wps="700", ppl="nan", wall="3661"),
    )})  # fmt: skip
    assert list(row.values()) == [
        "one", "3,000", "60.00", "21.00", "20.13 at update 1,000", "600", "1 h 01 min", "1 × 8, 2 × 4",
        "2",
    ]  # fmt: skip


def test_the_summary_of_a_dense_run_without_validation():
    (row,) = summary({"one": run_of(inner(5))})
    assert list(row.values()) == ["one", "5", "–", "–", "–", "–", "–", "none", "–"]


def test_the_summary_names_another_subset():
    (row,) = summary({"one": run_of(inner(5, moe_gate_loss="1"), valid(5, subset="test"))})
    assert row["Validation perplexity, last"] == "9.50 (test)"
    assert row["MoE layers × experts"] == "not logged"


def test_the_summary_has_the_accuracy_beside_the_perplexity_where_runs_log_them():
    log = [
        json.dumps({"epoch": 1, "valid_accuracy": a, "valid_num_updates": u})
        for u, a in (("3", "87.5"), ("6", "80"))
    ]
    runs = {"images": run_of(inner(2, accuracy="12.5"), *log), "words": run_of(inner(2, ppl="9"), valid(4))}
    rows = [list(row.values())[2:8] for row in summary(runs)]
    assert rows[0] == ["–", "–", "–", "12.50", "80.00", "87.50 at update 3"]
    assert rows[1] == ["9.00", "9.50", "9.50 at update 4", "–", "–", "–"]
    headings = [list(summary({"one": run})[0])[2] for run in runs.values()]
    assert headings == ["Training accuracy (%), last", "Training perplexity, last"]


def test_the_speed_of_images_is_not_called_tokens():
    images = run_of(inner(2, wps="80", wpb="16", bsz="16"), inner(4, wps="80", wpb="8", bsz="8"))
    words = run_of(inner(2, wps="900", wpb="300", bsz="16"))
    for unit, runs in (("Images", [images]), ("Tokens", [words]), ("Images or tokens", [images, words])):
        first, *_ = summary({str(i): run for i, run in enumerate(runs)})
        assert first[f"{unit} per second, median"] == ("900" if unit == "Tokens" else "80")


def test_durations():
    assert [duration(s) for s in (0, 61, 3600, 90061)] == [
        "0 min 00 s", "1 min 01 s", "1 h 00 min", "25 h 01 min",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["train.log", "deep/er/statistics.json", "out.txt"])
def test_a_folder_is_searched_for_its_log(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"hello\n{inner(10)}\n")
    (tmp_path / "other.json").write_text('{"ppl": 3}\n')
    log, files = find_log(tmp_path)
    assert files == [file]
    assert [entry.update for entry in log.entries] == [10]


def test_a_captured_output_beside_the_log_is_no_second_run(tmp_path):
    lines = [inner(10, gnorm="nan"), inner(20), inner(30)]
    (tmp_path / "train.json").write_text("\n".join(lines))
    (tmp_path / "a.log").write_text("\n".join(f"INFO | train_inner | {line}" for line in lines[:2]))
    _, files = find_log(tmp_path)
    assert files == [tmp_path / "train.json"]


def test_a_folder_with_several_runs_is_refused(tmp_path):
    (tmp_path / "a.log").write_text(inner(10, loss="1"))
    (tmp_path / "b.log").write_text(inner(10, loss="2"))
    with pytest.raises(ValueError, match=r"several runs \(.*a\.log, .*b\.log\); name one of them"):
        find_log(tmp_path)


def test_bytes_that_are_no_text_break_nothing(tmp_path):
    (tmp_path / "train.log").write_bytes(b"\xff\xfe" + inner(10).encode() + b"\n\x80\x00")
    assert len(find_log(tmp_path / "train.log")[0].entries) == 1


def test_lines_that_no_training_wrote_are_counted_as_damaged(monkeypatch, tmp_path):
    """Too deep, numbers too large for Python or a float, and lines without an end."""
    monkeypatch.setattr(training_log, "LONGEST_LINE", 6000)
    deep = '{"epoch": ' + "[" * 200_000
    path = tmp_path / "train.log"
    huge = inner(4, much="x").replace('"x"', "9" * 400)
    path.write_text("\n".join([inner(2), '{"epoch": ' + "9" * 5000 + "}", huge, "y" * 10_000]))
    log, _ = find_log(path)
    assert [entry.update for entry in log.entries] == [2, 4] and log.damaged == [2]
    assert "much" not in log.entries[1].values
    assert read_log([deep]).damaged == [1]
    assert max(map(len, training_log._lines_of(path))) == 6000


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_ordinary_file_is_no_log(kind, tmp_path):
    path = tmp_path / "log.json"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(
        ValueError, match=r"log\.json cannot be read \(the path is not a regular file\); give"
    ):
        find_log(path)


@pytest.mark.parametrize(
    "paths, names",
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/a/train.log", "runs/b/train.log"], ["a", "b"]),
        (["demo/train-dense.json", "demo/train-moe.json"], ["train-dense", "train-moe"]),
        (["x/lr0.1/s1", "x/lr0.2/s2"], ["lr0.1/s1", "lr0.2/s2"]),
        (["runs/a", "runs/a/more"], ["a", "a/more"]),
        (["runs/a"], ["a"]),
    ],
)
def test_runs_are_named_by_what_tells_their_paths_apart(tmp_path, paths, names):
    for path in paths:
        file = tmp_path / path
        if file.suffix in (".log", ".json"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        else:
            file.mkdir(parents=True, exist_ok=True)
    assert default_names([tmp_path / path for path in paths]) == names
