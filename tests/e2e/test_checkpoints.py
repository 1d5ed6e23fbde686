"""Checkpoints through the command line: any number of ranks, whole or absent, whatever happens."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli import USER_DIR, fairseq, refused, start, wait
from models import lm_args, mt_args

from fairseq_tutel.plugin.training.save import writing

FAULTY = str(Path(__file__).parent / "faulty_user_dir")
SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5)


def _load(folder, name="checkpoint_last.pt"):
    return torch.load(Path(folder) / name, weights_only=False)


def _train(data, folder, updates, ranks, freq, *extra):
    return fairseq(
        "train", *lm_args(data, folder, "--update-freq", freq, *extra, updates=updates), ranks=ranks
    )


def test_two_ranks_then_one_then_three(lm_data, tmp_path):
    through, straight = tmp_path / "through", tmp_path / "straight"
    words = (*SGD, "--batch-size", 8)  # some seven updates an epoch
    _train(lm_data, through, 3, 2, 2, *words)
    _train(lm_data, through, 5, 1, 4, *words)
    _train(lm_data, straight, 5, 1, 4, *words)
    expected, found = _load(straight), _load(through)
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    # Three ranks finish the epoch: every token of the corpus was seen once.
    finish = ("--max-epoch", 1, *words)
    _train(lm_data, through, 0, 3, 1, *finish)
    _train(lm_data, straight, 0, 1, 4, *finish)
    assert _tokens_of_epoch(_load(through)) == _tokens_of_epoch(_load(straight)) > 2000


def _tokens_of_epoch(checkpoint):
    train = dict(checkpoint["extra_state"]["metrics"])["train"]
    return next(float(state["sum"]) for _, name, _, state in train if name == "wpb")


def test_without_optimizer_state_all_experts_are_saved_and_one_process_opens_them(lm_data, tmp_path):
    _train(lm_data, tmp_path, 3, 2, 1, "--no-save-optimizer-state")
    saved = _load(tmp_path)
    assert "last_optimizer_state" not in saved
    assert saved["model"]["decoder.layers.0.fc1.experts.fc1_weight"].shape[0] == 4
    run = fairseq(
        "eval-lm", lm_data, "--user-dir", FAULTY.replace("tests/e2e/faulty_user_dir", "user_dir"),
        "--path", tmp_path / "checkpoint_last.pt", "--tokens-per-sample", 16, "--batch-size", 8,
    )  # fmt: skip
    assert "Perplexity" in run.output


def _train_with_fault(data, folder, fault, ranks, rank=0, updates=6):
    args = lm_args(data, folder, "--user-dir", FAULTY, "--save-interval-updates", 2, updates=updates)
    env = {"FAULT": fault, "FAULT_RANK": str(rank)}
    return wait(start("train", *args, ranks=ranks, env=env))


@pytest.mark.parametrize(
    ("fault", "ranks", "where"),
    [
        ("step:3:oom", 2, "the training step of update 2"),
        ("update:3:oom", 2, "training, after 2 updates"),
        ("update:3:oom", 1, "training, after 2 updates"),
    ],
)
def test_a_rank_without_memory_ends_the_job_with_its_error(lm_data, tmp_path, fault, ranks, where):
    rank = ranks - 1
    run = _train_with_fault(lm_data, tmp_path, fault, ranks, rank)
    assert all(code not in (0, None) for code in run.exit_codes)
    sentence = f"error: rank {rank} ran out of memory in {where}; lower --max-tokens"
    assert run.logs[rank].splitlines()[-1].startswith(sentence)


def test_a_nan_ends_every_rank_with_one_sentence(lm_data, tmp_path):
    run = _train_with_fault(lm_data, tmp_path, "step:4:nan", ranks=2, rank=1)
    assert all(code not in (0, None) for code in run.exit_codes)
    for log in run.logs:
        last = log.splitlines()[-1]
        assert last.startswith("error: the loss or a gradient became NaN or infinite at update 3")
        assert "lower --lr" in last
    assert _load(tmp_path)["optimizer_history"][-1]["num_updates"] == 2


def test_infinite_gradients_of_an_encoder_decoder_end_with_one_sentence(mt_data, tmp_path):
    """Stock looks for them in what each module returns, of which an encoder's is a dict of lists."""
    output = refused("train", *mt_args(mt_data, tmp_path, "--moe-gate-loss-wt", 1e30))
    assert "became NaN or infinite at update 0" in output.splitlines()[-1]
    assert "StopIteration" not in output


def test_a_full_disk_is_an_error_and_costs_no_checkpoint(lm_data, tmp_path):
    run = _train_with_fault(lm_data, tmp_path, "save:2:full", ranks=1)
    assert run.exit_codes == [1]
    assert re.match("error: .*checkpoint.* could not be written: ", run.output.splitlines()[-1])
    assert _load(tmp_path)["optimizer_history"][-1]["num_updates"] == 2


def test_a_folder_that_another_training_writes_into_is_refused_on_all_ranks(lm_data, tmp_path):
    """Also to a dense model; the other training is this process."""
    dense = [
        lm_data, "--user-dir", USER_DIR, "--task", "language_modeling", "--arch", "transformer_lm",
        "--optimizer", "adam", "--batch-size", 4, "--save-dir", tmp_path,
    ]  # fmt: skip
    with writing(str(tmp_path)):
        run = wait(start("train", *dense, ranks=2))
    assert run.exit_codes == [1, 1]
    for log in run.logs:
        sentence = f"--save-dir is {tmp_path}, where process {os.getpid()} on .* is training; give"
        assert re.search(sentence, log.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def trained(lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    _train(lm_data, folder, 2, 1, 1)
    return folder


def test_a_torn_file_is_refused_before_training(lm_data, trained, tmp_path):
    torn = (trained / "checkpoint_last.pt").read_bytes()[:4096]
    (tmp_path / "checkpoint_last.pt").write_bytes(torn)
    output = refused("train", *lm_args(lm_data, tmp_path))
    assert "checkpoint_last.pt, which is corrupt" in output
    assert "older checkpoint" in output


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (
            ("--moe-expert-type", "glu"),
            "--moe-expert-type: 'ffn' (saved) → 'glu' (given)",
        ),
        (("--moe-freq", 2), "was saved with --moe-freq 1, this run has 2; give --moe-freq 1"),
    ],
)
def test_a_checkpoint_of_other_layers_is_refused(lm_data, trained, tmp_path, option, named):
    shutil.copy(trained / "checkpoint_last.pt", tmp_path)
    output = refused("train", *lm_args(lm_data, tmp_path, *option))
    assert named in output and "Traceback" not in output


def test_a_checkpoint_of_another_shape_is_refused(lm_data, trained, tmp_path):
    shutil.copy(trained / "checkpoint_last.pt", tmp_path)
    output = refused("train", *lm_args(lm_data, tmp_path, "--moe-expert-count", 8))
    assert "was saved with 4 experts in decoder_0, this run has 8; give --moe-expert-count 4" in output
    assert "architectures match" not in output
