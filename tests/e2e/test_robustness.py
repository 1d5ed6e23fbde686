"""Several ranks through fairseq-train: missing ranks and different options are named in time."""

import shutil
from pathlib import Path

from cli import start, start_each, tail, wait
from models import lm_args

FAULTY = str(Path(__file__).parent / "faulty_user_dir")
TIMEOUT_S = 3


def _start(data, folder, *flags, fault, rank, ranks=2):
    words = lm_args(data, folder, "--user-dir", FAULTY, "--moe-comm-timeout", TIMEOUT_S, *flags)
    return start("train", *words, ranks=ranks, env={"FAULT": fault, "FAULT_RANK": str(rank)})


def _last_error(log):
    return [line for line in log.splitlines() if "rror: " in line][-1]


def test_a_killed_rank_is_named_by_the_others(lm_data, tmp_path):
    flags = ("--moe-expert-count", 3)
    run = wait(_start(lm_data, tmp_path, *flags, fault="step:3:kill", rank=1, ranks=3))
    assert run.exit_codes[1] == -9 and 0 not in run.exit_codes
    for rank in (0, 2):
        error = _last_error(run.logs[rank])
        assert error.startswith(f"error: rank {rank} "), tail(run.logs[rank])
        assert "rank 1 ended without an error message, as after SIGKILL" in error
        assert run.logs[rank].count("rank 1 ended without") == 1
        assert "Traceback" not in run.logs[rank], tail(run.logs[rank])
    assert not (tmp_path / "crash.pt").exists()


def test_a_stopped_rank_ends_the_others_in_fairseq_s_own_collectives(lm_data, tmp_path):
    flags = ("--moe-expert-parallel-size", 1)
    started = _start(lm_data, tmp_path, *flags, fault="step:3:stop", rank=1)
    (process, _), (stopped, _) = started
    process.join(60)  # start-up, the time-out and the health check: torch alone would wait half an hour
    assert process.exitcode not in (0, None)
    stopped.kill()
    run = wait(started)
    error = _last_error(run.logs[0])
    assert "error: rank 0 could not finish a collective of fairseq's own: rank 1 did not" in error
    assert "raise --moe-comm-timeout if it is only slow" in error
    assert '"num_updates": "2"' in run.logs[0]


def test_ranks_with_different_options_end_at_the_start(lm_data, tmp_path):
    first, second = (lm_args(lm_data, tmp_path, "--moe-top-k", k) for k in (2, 1))
    run = wait(start_each("train", first, second))
    for log in run.logs:
        error = _last_error(log)
        assert "--moe-top-k is 2 on rank 0 and 1 on rank 1" in error, tail(log)
        assert "start all ranks with the same command, packages and data." in error
        assert "CommunicationError" not in log


def test_files_and_logs_may_differ_between_ranks_but_not_the_dictionary(lm_data, tmp_path):
    other = tmp_path / "data"
    shutil.copytree(lm_data, other)
    own = ("--log-interval", 5, "--log-file", tmp_path / "log", "--keep-last-epochs", 2)
    first = lm_args(lm_data, tmp_path / "a", updates=1)
    run = wait(start_each("train", first, lm_args(other, tmp_path / "b", *own, updates=1)))
    assert run.ok, tail(run.output)
    lines = (other / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    run = wait(start_each("train", first, lm_args(other, tmp_path / "a")))
    for log in run.logs:
        assert "the digest of the source dictionary is " in _last_error(log), tail(log)
