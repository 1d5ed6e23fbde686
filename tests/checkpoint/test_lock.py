"""One process at a time can lock a folder, and the lock ends with the process."""

import os
import subprocess
import sys

import pytest

from fairseq_tutel.checkpoint import lock
from fairseq_tutel.checkpoint.lock import locked

HOLD = """
import os, sys
from fairseq_tutel.checkpoint.lock import locked
with locked(sys.argv[1]):
    child = os.fork()  # as a data loader's worker, which lives on after a kill of its parent
    if child == 0:
        sys.stdin.read()
        os._exit(0)
    print(child, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_folder_stays_locked_until_the_locking_process_ends(tmp_path, end):
    folder = str(tmp_path / "save")
    command = [sys.executable, "-c", HOLD, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        worker = int(process.stdout.readline())
        with pytest.raises(ValueError, match=f"{folder}, where process {process.pid} on ") as error:
            locked(folder).__enter__()
        assert str(error.value).endswith(".")
        if end == "kill":
            process.kill()
            process.wait()
            os.kill(worker, 0)  # The worker process is alive but does not hold the lock.
        else:
            process.stdin.close()
            process.wait()
        with locked(folder) as is_held:
            assert is_held and os.listdir(folder) == ["writer.lock"]
        assert not os.listdir(folder)


def test_a_lock_file_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    take, removed = lock._lock, []

    def remove_first(file, folder):
        if not removed:
            removed.append(os.remove(tmp_path / lock.NAME))
        return take(file, folder)

    monkeypatch.setattr(lock, "_lock", remove_first)
    with locked(str(tmp_path)):
        assert os.listdir(tmp_path) == [lock.NAME]
