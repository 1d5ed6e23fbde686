"""A lease on a folder: one writer; who ended is known here by its process, elsewhere by its silence."""

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from leases import ELSEWHERE, leave

from fairseq_tutel.checkpoint import lease
from fairseq_tutel.checkpoint.lease import NAME, read, take, this_process


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "save")


def taken(folder, between=lambda: None):
    """Take a lease; return it, and how often it was waited for."""
    waits = []

    def wait(seconds):
        if seconds == lease.POLL_SECONDS:
            waits.append(seconds)
            between()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease.time, "sleep", wait)
        return take(folder), len(waits)


@pytest.fixture(scope="module")
def process():
    """A process of this machine that lives."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.communicate()


def here(pid):
    return replace(this_process(), pid=pid, started=lease._started(pid))


def test_a_lease_is_taken_released_and_taken_again(folder):
    for _ in range(2):
        held, _ = taken(folder)
        assert held.after is None
        assert read(held.path)[0] == held.own
        held.confirm()
        held.release()
        assert os.listdir(folder) == []


def test_a_living_writer_of_this_machine_is_named_at_once(folder, process):
    leave(folder, here(process.pid), seconds=10 * lease.STALE_SECONDS)
    with pytest.raises(ValueError) as caught:
        take(folder)
    assert str(caught.value) == (
        f"--save-dir is {folder}, where process {process.pid} on {this_process().host} is training; give "
        "another --save-dir, or end that process first."
    )
    assert os.listdir(folder) == [NAME]


@pytest.mark.parametrize("hidden", ["kill", "stat"])
def test_another_user_s_process_is_alive_though_little_of_it_is_to_be_seen(
    folder, process, monkeypatch, hidden
):
    leave(folder, here(process.pid))

    def refuse(*_):
        raise PermissionError

    if hidden == "kill":
        monkeypatch.setattr(os, "kill", refuse)
    else:
        monkeypatch.setattr(lease, "_started", lambda pid: None)
    with pytest.raises(ValueError, match="is training"):
        take(folder)


def test_a_writer_that_ended_here_is_followed_at_once(folder):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = here(child.pid)
    leave(folder, gone)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as under a busy launcher
    held, waits = taken(folder)
    assert (held.after, waits) == (gone, 0)
    held.release()
    child.communicate()
    leave(folder, gone)
    held, waits = taken(folder)
    assert (held.after, waits) == (gone, 0)
    held.release()


@pytest.mark.parametrize(
    ("change", "seconds", "followed"),
    [
        ({}, 0, False),  # this process may train again
        ({"started": "1"}, 0, True),  # another process has the number by now
        ({"machine": "another"}, lease.STALE_SECONDS + 5, True),
        *(({"pid": pid}, 0, False) for pid in (-1, 0, 2**40, "12", 1.5, True)),
    ],
)
def test_a_lease_that_nobody_renews_is_taken_at_once(folder, change, seconds, followed):
    writer = replace(this_process(), **change)
    leave(folder, writer, seconds)
    held, waits = taken(folder)
    assert (held.after, waits) == (writer if followed else None, 0)
    held.release()


def test_a_writer_elsewhere_that_renews_is_refused_by_the_first_sign(folder):
    path = leave(folder, ELSEWHERE, seconds=20)
    waits = []

    def renew():
        waits.append(1)
        if len(waits) == 3:
            os.utime(path)

    with pytest.raises(ValueError, match="where process 12 on node7 is training"):
        taken(folder, renew)
    assert len(waits) == 3


def test_a_writer_elsewhere_that_falls_silent_is_followed(folder, monkeypatch):
    leave(folder, ELSEWHERE, seconds=20)
    passed = iter([0.0, 1.0, 50.0, 99.0, 101.0])
    monkeypatch.setattr(lease.time, "monotonic", lambda: next(passed))
    held, waits = taken(folder)
    monkeypatch.undo()
    assert (held.after, waits) == (ELSEWHERE, 3)  # 20 + 101 seconds are too long
    held.release()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 3}', "null"])
def test_a_file_that_is_no_lease_is_nobody_s(folder, content):
    os.makedirs(folder)
    with open(os.path.join(folder, NAME), "w") as file:
        file.write(content)
    held, waits = taken(folder)
    assert waits == 0
    held.release()


def test_of_two_that_find_the_same_lease_one_has_it(folder, monkeypatch):
    leave(folder, ELSEWHERE, seconds=1000)
    both = threading.Barrier(2)
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: both.wait(60))
    found = []

    def compete():
        with contextlib.suppress(ValueError):
            found.append(take(folder))

    threads = [threading.Thread(target=compete) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (held,) = found
    held.release()
    assert os.listdir(folder) == []


def test_a_writer_that_lost_its_lease_writes_no_more(folder):
    held, _ = taken(folder)
    leave(folder, ELSEWHERE)
    with pytest.raises(
        ValueError, match=r"process 12 on node7 has taken over.*did not renew its lease for 120 s"
    ):
        held.confirm()
    held.release()
    assert read(held.path)[0] == ELSEWHERE  # which is not released by another


def test_a_folder_that_was_cleared_is_still_this_writer_s(folder):
    held, _ = taken(folder)
    os.remove(held.path)
    os.rmdir(folder)
    held.confirm()
    assert read(held.path)[0] == held.own
    held.release()


def test_a_lease_is_renewed_beside_the_work_while_it_is_this_process_s(folder, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    held, _ = taken(folder)
    os.utime(held.path, (1, 1))
    while os.stat(held.path).st_mtime == 1:
        pass
    leave(folder, ELSEWHERE)
    os.utime(held.path, (1, 1))
    held._thread.join(0.2)
    assert os.stat(held.path).st_mtime == 1
    held.release()


def test_a_disk_without_links_has_leases_too(folder, monkeypatch, process):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    held, _ = taken(folder)
    held.release()
    leave(folder, here(process.pid))
    with pytest.raises(ValueError, match="is training"):
        take(folder)


def test_a_start_that_waits_has_no_file_to_leave(folder):
    leave(folder, ELSEWHERE, seconds=lease.STALE_SECONDS - 1)
    seen = []

    def look(seconds):
        seen.append(os.listdir(folder))
        raise KeyboardInterrupt  # as a kill

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lease.time, "sleep", look)
        take(folder)
    assert seen == [[NAME]]
