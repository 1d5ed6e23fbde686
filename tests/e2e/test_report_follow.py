"""`report --follow` by its command: a log that appears, grows, is truncated, and ends."""

import os
import signal
import time

from cli import start, wait
from report_page import page_in

RECORD = '{{"epoch": 1, "ppl": "{}", "num_updates": "{}"}}\n'
RELOAD = "location.reload()"
SECONDS = 120


def record(update):
    return RECORD.format(200 - update, update)


def following(log, output):
    return start("tutel-__main__", "report", log, "--output", output, "--follow", "--interval", 0.1)


def wait_for(true, log):
    """Wait for a condition while the command, whose output is in the log, runs."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def append(log, text):
    with log.open("a") as file:
        file.write(text)


def updates_in(output):
    """Return the number of updates in the summary of a page, or None without a page."""
    return page_in(output).cells[1] if output.exists() else None


def test_the_page_follows_a_log_that_appears_grows_and_is_truncated(tmp_path):
    log, output = tmp_path / "train.log", tmp_path / "page.html"
    started = following(log, output)
    ((process, printed),) = started
    wait_for(lambda: printed.exists() and f"following {log};" in printed.read_text(), printed)
    append(log, record(10) + record(20)[:30])
    wait_for(lambda: updates_in(output) == "10", printed)
    assert RELOAD in output.read_text()
    append(log, record(20)[30:])
    wait_for(lambda: updates_in(output) == "20", printed)
    log.write_text("")
    log.with_name("new").write_text(record(5))
    os.replace(log.with_name("new"), log)
    wait_for(lambda: updates_in(output) == "5", printed)
    os.kill(process.pid, signal.SIGINT)
    run = wait(started)
    assert run.ok
    assert run.output.splitlines()[-1] == f"wrote {output}"
    assert "Traceback" not in run.output
    assert updates_in(output) == "5" and RELOAD not in output.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "train.log"]
