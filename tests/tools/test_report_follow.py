"""report --follow: when a page is written, and that the last one never reloads itself."""

import pytest

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


def test_a_log_without_records_is_read_again(log):
    missing = [NoRecordError("none."), FileNotFoundError("replaced")]
    steps = Steps(log, *missing, ("one", False), NoRecordError("truncated."), ("two", True))
    assert steps.run()
    assert [text.split(",")[0] for text in steps.written] == ["one", "two", "two"]
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
    assert [entry.update for entry in find_log(log)[0].entries] == [1]


def test_a_run_is_over_until_it_is_resumed():
    start, end = "training on 1 devices (GPUs/TPUs)\n", "2026-01-02 | done training in 12.3 seconds\n"
    assert not read_log([start, RECORD % 1]).is_over
    assert read_log([start, RECORD % 1, end]).is_over
    assert not read_log([start, RECORD % 1, end, start]).is_over
