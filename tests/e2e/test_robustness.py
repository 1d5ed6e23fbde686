"""Several ranks through fairseq-train: missing ranks and different options are named in time."""

import shutil
from pathlib import Path

from cli import start, start_each, tail, wait
from models import lm_args, mt_args

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


def test_a_stopped_rank_ends_the_others_in_time_in_what_fairseq_sends_too(lm_data, tmp_path):
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


def test_ranks_with_different_options_are_told_so_at_start(lm_data, tmp_path):
    first, second = (lm_args(lm_data, tmp_path, "--moe-top-k", k) for k in (2, 1))
    run = wait(start_each("train", first, second))
    for log in run.logs:
        error = _last_error(log)
        assert "--moe-top-k is 2 on rank 0 and 1 on rank 1" in error, tail(log)
        assert "start all ranks with the same command, packages and data." in error
        assert "CommunicationError" not in log
    assert run.seconds < 60


def test_a_model_of_encoder_and_decoder_is_compared_too(mt_data, tmp_path):
    first, second = (mt_args(mt_data, tmp_path, "--encoder-ffn-embed-dim", n) for n in (32, 48))
    run = wait(start_each("train", first, second))
    for log in run.logs:
        error = _last_error(log)
        assert "error: --encoder-ffn-embed-dim is 32 on rank 0 and 48 on rank 1" in error, tail(log)


def test_another_dictionary_of_the_same_size_is_told(lm_data, tmp_path):
    other = tmp_path / "data"
    shutil.copytree(lm_data, other)
    lines = (other / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    run = wait(start_each("train", lm_args(lm_data, tmp_path / "a"), lm_args(other, tmp_path / "a")))
    for log in run.logs:
        assert "the digest of the source dictionary is " in _last_error(log), tail(log)


def test_what_a_rank_may_have_of_its_own_is_not_compared(lm_data, tmp_path):
    other = tmp_path / "data"
    shutil.copytree(lm_data, other)
    own = ("--log-interval", 5, "--log-file", tmp_path / "log", "--data-buffer-size", 3)
    own = (*own, "--tensorboard-logdir", tmp_path / "board", "--keep-last-epochs", 2)
    run = wait(
        start_each(
            "train",
            lm_args(lm_data, tmp_path / "a", updates=1),
            lm_args(other, tmp_path / "b", *own, updates=1),
        )
    )
    assert run.ok, tail(run.output)
