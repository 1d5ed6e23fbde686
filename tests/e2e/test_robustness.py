"""If a rank of fairseq-train dies, hangs or has different options, the other ranks end with an error."""

from cli import start, start_each, tail, wait
from faults.trial import PLACES, Trial, environment
from models import lm_args


def _start(data, folder, what, *flags, ranks):
    """Start a run in which rank 1 is killed or stopped in the third training step."""
    words = lm_args(data, folder / "save", "--user-dir", PLACES, *flags)
    trial = Trial(what=what, place="train", when=3, rank=1)
    return start("train", *words, ranks=ranks, env=environment(folder, trial))


def _last_error(log):
    return [line for line in log.splitlines() if "rror: " in line][-1]


def test_the_other_ranks_name_a_killed_rank_in_their_error(lm_data, tmp_path):
    flags = ("--moe-expert-count", 3, "--moe-comm-timeout", 3)
    run = wait(_start(lm_data, tmp_path, "kill", *flags, ranks=3))
    assert run.exit_codes[1] == -9 and 0 not in run.exit_codes
    for rank in (0, 2):
        error = _last_error(run.logs[rank])
        assert error.startswith(f"error: rank {rank} "), tail(run.logs[rank])
        assert "rank 1 ended without an error message, as after SIGKILL" in error
        assert run.logs[rank].count("rank 1 ended without") == 1
        assert "Traceback" not in run.logs[rank], tail(run.logs[rank])
    assert not (tmp_path / "save" / "crash.pt").exists()


def test_the_other_rank_ends_with_an_error_if_one_rank_is_stopped(lm_data, tmp_path):
    flags = ("--moe-expert-parallel-size", 1, "--moe-comm-timeout", 1)
    started = _start(lm_data, tmp_path, "stop", *flags, ranks=2)
    (process, _), (stopped, _) = started
    process.join(60)  # without the plugin, torch would wait 30 minutes
    assert process.exitcode not in (0, None)
    stopped.kill()
    run = wait(started)
    error = _last_error(run.logs[0])
    assert "error: rank 0 could not finish a collective of fairseq's own: rank 1 did not" in error
    assert "raise --moe-comm-timeout if it is only slow" in error
    assert '"num_updates": "2"' in run.logs[0]


def test_ranks_with_different_options_end_with_an_error_before_training(lm_data, tmp_path):
    first, second = (lm_args(lm_data, tmp_path, "--moe-top-k", k) for k in (2, 1))
    run = wait(start_each("train", first, second))
    for log in run.logs:
        error = _last_error(log)
        assert "--moe-top-k is 2 on rank 0 and 1 on rank 1" in error, tail(log)
        assert "start all ranks with the same command, packages and data." in error
        assert "CommunicationError" not in log
