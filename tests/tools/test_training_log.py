"""Tests the reader of fairseq's training logs, and the summary table of `fairseq-tutel report`."""

# ruff: noqa: RUF001 - the tests need dashes and multiplication signs

import json
import logging
import math

import pytest
from fairseq.logging.progress_bar import progress_bar

from fairseq_tutel.tools.report.page import duration, summary
from fairseq_tutel.tools.training_log import Record, find_log, join, read_log


def inner(update, loss="3.5", wall=None, **stats):
    """Return a record of one log interval in training (train_inner), in fairseq's JSON format."""
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
def test_a_log_record_is_read_equally_in_every_log_format(form):
    log = read_log([form.format(inner(10, load=[0.5, 1.5])), form.format(valid(10))])
    assert log.entries == [
        Record("train_inner", 10, {"epoch": 1, "update": 0.1, "loss": 3.5, "num_updates": 10},
              {"load": [0.5, 1.5]}),
        Record("valid", 10, {"epoch": 1, "ppl": 9.5, "num_updates": 10}),
    ]  # fmt: skip


@pytest.mark.parametrize("prefix", ("", "2026-01-02 03:04:05 | INFO | valid | "))
def test_fairseq_s_simple_log_format_gives_the_records_of_the_json_format(prefix, caplog):
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


def test_the_time_of_an_epoch_record_is_wall_and_not_train_wall():
    stats = {"train_num_updates": "7", "train_train_wall": "3", "train_wall": "5"}
    (record,) = run_of(json.dumps(stats)).training
    assert record.values == {"num_updates": 7, "train_wall": 3, "wall": 5}
    assert record.seconds == 5


def test_log_lines_without_a_record_are_ignored():
    lines = [
        "{'_name': None, 'eval_bleu_args': '{\"beam\": 2}'}",
        'setting {"beam": 4}', '{"num_updates": "many"}', '{"valid_ppl": "3.1"}', "[1, 2]", "",
    ]  # fmt: skip
    log = read_log(lines)
    assert not log.entries


def test_repeated_log_lines_count_as_one_record():
    run = run_of(*[inner(10, wall=5)] * 2, *[valid(10)] * 3, *[inner(20, wall=9)] * 3)
    assert updates(run) == [10, 20]
    assert seconds(run) == [5, 9] and run.notes == []


def test_unreadable_log_records_are_ignored():
    """An unreadable record is incomplete, nested too deeply, or has a number that is too large."""
    deep, large = '{"epoch": ' + "[" * 200_000, '{"epoch": ' + "9" * 5000 + "}"
    assert updates(run_of(inner(10), inner(20)[:40], deep, large, inner(30), inner(40)[:-1])) == [10, 30]


@pytest.mark.parametrize("value", ["nan", "-inf", math.inf])
def test_logged_values_that_are_not_finite_are_kept(value):
    run = run_of(inner(10), inner(20, loss=value), inner(30, loss=value, gnorm="1"))
    assert not math.isfinite(run.training[1].values["loss"])


def test_nan_in_a_logged_list_is_kept_and_text_is_ignored():
    run = run_of(inner(10, moe_load_decoder_0=[1.0, math.nan, None], mood="good", empty=None))
    (record,) = run.training
    assert record.values.keys() == {"epoch", "update", "loss", "num_updates"}
    load = record.lists["moe_load_decoder_0"]
    assert load[0] == 1 and math.isnan(load[1]) and math.isnan(load[2])


def test_the_later_of_two_log_records_of_an_update_is_kept():
    run = run_of(inner(10, loss="4"), inner(20, loss="3"), inner(20, loss="2"))
    assert [record.values["loss"] for record in run.training] == [4, 2]


def test_records_of_a_resumed_run_replace_repeated_updates_and_add_time():
    run = run_of(
        "training on 2 devices (GPUs/TPUs)", inner(10, wall=6), inner(20, wall=9), valid(20),
        inner(30, wall=14),
        "training on 4 devices (GPUs/TPUs)", inner(20, loss="1", wall=5), inner(40, wall=25),
    )  # fmt: skip
    assert updates(run) == [10, 20, 40]
    assert seconds(run) == [6, 14 + 5, 14 + 25]
    assert "valid" not in run.records  # the resumed run computed update 20 again
    assert run.training[1].values["loss"] == 1
    assert run.ranks == [2, 4]
    assert run.notes == ["Resumed: a new process logs from update 20 on."]


@pytest.mark.parametrize(
    "between, first_wall",
    [(["training on 1 devices (GPUs/TPUs)"], 50), ([], 3)],
    ids=["start line", "smaller wall"],
)
def test_a_new_process_that_repeats_no_update_counts_as_a_resume(between, first_wall):
    run = run_of(inner(10, wall=6), *between, inner(20, wall=first_wall))
    assert updates(run) == [10, 20]
    assert seconds(run) == [6, 6 + first_wall]
    assert run.notes == ["Resumed: a new process logs from update 20 on."]


def test_time_is_computed_from_updates_per_second_if_wall_is_0():
    """After a resume within an epoch, fairseq logs a wall time of 0."""
    run = run_of(
        "training on 1 devices (GPUs/TPUs)", inner(10, wall=6), inner(20, wall=9),
        "training on 1 devices (GPUs/TPUs)", inner(30, wall=0, ups="2"), inner(40, wall=0, ups="0.5"),
    )  # fmt: skip
    assert seconds(run) == [6, 9, 9 + 10 / 2, 9 + 10 / 2 + 10 / 0.5]


def test_a_validation_record_has_the_time_of_the_last_training_record():
    run = run_of(valid(5), inner(10, wall=6), valid(12))
    first, second = run.records["valid"]
    assert math.isnan(first.seconds)
    assert second.seconds == 6


def test_epoch_records_are_used_if_a_log_has_no_interval_records():
    run = run_of(
        json.dumps({"train_loss": "4", "train_num_updates": "59"}), valid(59), valid(59, subset="test")
    )
    assert updates(run, "train") == [59]
    assert [record.update for record in run.training] == [59]
    assert list(run.subsets) == ["valid", "test"]


def test_the_summary_of_a_run_has_the_values_of_the_log():
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
    (row,) = summary({"one": run_of(inner(5), valid(5, subset="test"))})
    assert list(row.values()) == ["one", "5", "–", "9.50 (test)", "9.50 at update 5", "–", "–", "–", "–"]


def test_the_summary_of_runs_has_accuracies_or_perplexities():
    log = [
        json.dumps({"epoch": 1, "valid_accuracy": a, "valid_num_updates": u})
        for u, a in (("3", "87.5"), ("6", "80"))
    ]
    runs = {"images": run_of(inner(2, accuracy="12.5"), *log), "words": run_of(inner(2, ppl="9"), valid(4))}
    rows = [list(row.values())[2:8] for row in summary(runs)]
    assert rows[0] == ["–", "–", "–", "12.50", "80.00", "87.50 at update 3"]
    assert rows[1] == ["9.00", "9.50", "9.50 at update 4", "–", "–", "–"]


def test_durations_are_printed_in_hours_or_minutes():
    assert [duration(s) for s in (0, 61, 3600, 90061)] == [
        "0 min 00 s", "1 min 01 s", "1 h 00 min", "25 h 01 min",
    ]  # fmt: skip


def test_the_training_log_in_a_folder_is_found(tmp_path):
    file = tmp_path / "deep" / "statistics.json"
    file.parent.mkdir()
    file.write_bytes(b"\xff\xfe hello\n" + inner(10).encode() + b"\n\x80\x00")
    (tmp_path / "other.json").write_text('{"ppl": 3}\n')
    log, found = find_log(tmp_path)
    assert found == file and [entry.update for entry in log.entries] == [10]


def test_two_logs_with_equal_records_count_as_one_run(tmp_path):
    lines = [inner(10, gnorm="nan"), inner(20), inner(30)]
    (tmp_path / "train.json").write_text("\n".join(lines))
    (tmp_path / "a.log").write_text("\n".join(f"INFO | train_inner | {line}" for line in lines[:2]))
    assert find_log(tmp_path)[1] == tmp_path / "train.json"
    (tmp_path / "b.log").write_text(inner(10, loss="1"))
    with pytest.raises(ValueError, match=r"several runs \(.*b\.log, .*train\.json\); give one"):
        find_log(tmp_path)
