"""report --follow: when a page is written, and that the last one never reloads itself."""

import pytest
from tool_in_process import refusal_of

from fairseq_tutel.tools.report.follow import follow
from fairseq_tutel.tools.training_log import NoRecordError, find_log, read_log

RECORD = '{"epoch": 1, "loss": "3", "num_updates": "%d"}\n'


class Steps:
    """Draws that change the log each time, and end as the list of results says."""

    def __init__(self, log, *results):
        self.log, self.results, self.written = log, list(results), []

    def draw(self):
        with self.log.open("a") as file:
            file.write("changed\n")
        result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        text, over = result
        return (lambda reload: f"{text}, reload {reload}"), over

    def run(self):
        return follow([self.log], 0.01, self.draw, self.written.append)


@pytest.fixture
def log(tmp_path):
    (tmp_path / "train.log").touch()
    return tmp_path / "train.log"


def test_a_page_is_written_at_each_change_and_at_the_end_without_reload(log):
    steps = Steps(log, ("one", False), ("two", True))
    assert steps.run()
    assert steps.written == ["one, reload 0.01", "two, reload 0.01", "two, reload None"]


@pytest.mark.parametrize("end", (KeyboardInterrupt(), ValueError("the disk is full.")))
def test_the_last_page_does_not_reload_after_an_interrupt_or_error(log, end):
    steps = Steps(log, ("one", False), end)
    if isinstance(end, ValueError):
        with pytest.raises(ValueError, match="full"):
            steps.run()
    else:
        assert steps.run()
    assert steps.written == ["one, reload 0.01", "one, reload None"]


def test_a_log_without_records_is_waited_for_and_announced_once(log, capsys):
    waiting = [NoRecordError("none."), FileNotFoundError("replaced")]
    steps = Steps(log, *waiting, ("one", False), NoRecordError("truncated."), ("two", True))
    assert steps.run()
    assert [text.split(",")[0] for text in steps.written] == ["one", "two", "two"]
    # Once at the start, once after the truncation.
    assert capsys.readouterr().out == f"waiting for a training record in {log}\n" * 2
    assert not Steps(log, KeyboardInterrupt()).run()


def test_an_unchanged_log_is_not_drawn_again(log, monkeypatch):
    steps, sleeps = Steps(log, ("one", False)), []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    steps.draw = lambda: (str, False)
    assert steps.run()
    assert sleeps == [0.01] * 3 and steps.written == ["0.01", "None"]


def test_a_last_line_without_an_end_is_left_out_of_a_log_that_grows(log):
    log.write_text(RECORD % 1 + (RECORD % 2).rstrip())
    assert [entry.update for entry in find_log(log)[0].entries] == [1, 2]
    assert [entry.update for entry in find_log(log, grows=True)[0].entries] == [1]
    log.write_text(RECORD % 1 + (RECORD % 2)[:20])
    assert find_log(log)[0].damaged == [2] and find_log(log, grows=True)[0].damaged == []


def test_a_run_is_over_until_it_is_resumed():
    start, end = "training on 1 devices (GPUs/TPUs)\n", "2026-01-02 | done training in 12.3 seconds\n"
    assert not read_log([start, RECORD % 1]).is_over
    assert read_log([start, RECORD % 1, end]).is_over
    assert not read_log([start, RECORD % 1, end, start]).is_over


@pytest.mark.parametrize("interval", ("0", "-1", "nan", "inf", "86401"))
def test_a_wrong_interval_is_refused(log, interval):
    sentence = refusal_of("report", log, "--follow", f"--interval={interval}")
    assert sentence.startswith("--interval is") and "give seconds above 0 and at most 86400." in sentence


def test_an_interval_without_follow_is_refused(log):
    assert refusal_of("report", log, "--interval", 5).startswith("--interval is 5, but has no effect")
