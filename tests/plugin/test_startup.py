"""Tests code of the plugin that runs before fairseq's main function, and after an error."""

import argparse
import contextlib
import logging
import sys
from types import FunctionType, SimpleNamespace

import pytest
import torch
from fairseq.data.iterators import BufferedIterator
from omegaconf import OmegaConf

from fairseq_tutel import train
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.parallel import guard, rendezvous
from fairseq_tutel.plugin.registration import wrapped
from fairseq_tutel.plugin.registration.process import end_readers, excepthook, refusals_are_sentences
from fairseq_tutel.plugin.training.startup import join_torchrun, note_spawned_ranks, set_timeout


@pytest.mark.parametrize(("visible", "local", "device"), [(4, "2", 2), (1, "2", 0), (4, None, 3)])
def test_a_rank_uses_the_visible_gpu_of_its_local_rank(monkeypatch, visible, local, device):
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("WORLD_SIZE", "8"), ("RANK", "7"),
        ("LOCAL_RANK", local),
    ):  # fmt: skip
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    cfg = OmegaConf.create(
        {
            "common": {"cpu": False},
            # Under torchrun, fairseq first sets the world size to the number of GPUs of one node.
            "distributed_training": {
                "distributed_init_method": None, "distributed_world_size": visible,
                "ddp_backend": "pytorch_ddp",
            },
        }
    )  # fmt: skip
    join_torchrun(cfg)
    joined = cfg.distributed_training
    assert taken == [joined.device_id] == [device]
    assert (joined.distributed_rank, joined.distributed_world_size) == (7, 8)
    assert joined.ddp_backend == "pytorch_ddp"


@pytest.mark.parametrize(("num_procs", "ranks", "expected"), [(8, 16, 8), (8, 2, 2)])
def test_ranks_per_node_is_the_number_of_spawned_ranks(monkeypatch, num_procs, ranks, expected):
    monkeypatch.setattr(rendezvous, "_spawned_ranks", 0)
    slurm = {"SLURM_NTASKS_PER_NODE": "1"}  # Slurm starts one task, which spawns ranks
    cfg = OmegaConf.create(
        {
            "distributed_training": {
                "distributed_init_method": "tcp://a:1", "distributed_no_spawn": False,
                "distributed_num_procs": num_procs, "distributed_world_size": ranks,
            }
        }
    )  # fmt: skip
    note_spawned_ranks(cfg)
    assert rendezvous.ranks_per_node(slurm) == expected
    cfg.distributed_training.distributed_no_spawn = True
    note_spawned_ranks(cfg)
    assert rendezvous.ranks_per_node(slurm) == 1


@pytest.mark.parametrize("seconds", [-1, 10**9])
def test_a_moe_comm_timeout_that_is_negative_or_too_large_is_refused(seconds):
    before = guard.timeout_of_groups()
    with pytest.raises(ValueError, match=f"^--moe-comm-timeout is {seconds}; give "):
        set_timeout(argparse.Namespace(moe_comm_timeout=seconds))
    assert guard.timeout_of_groups() == before


def test_the_criterion_gets_the_ddp_backend_of_the_run(monkeypatch):
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
        ("WORLD_SIZE", "2"),
        ("RANK", "0"),
    ):
        monkeypatch.setenv(name, value)
    cfg = _training()
    cfg.distributed_training.distributed_init_method = None
    cfg.distributed_training.ddp_backend = "pytorch_ddp"
    cfg.criterion = {"ddp_backend": "pytorch_ddp"}  # adaptive_loss copies --ddp-backend
    join_torchrun(cfg)
    assert cfg.criterion.ddp_backend == cfg.distributed_training.ddp_backend == "legacy_ddp"


def _training(**model):
    """Return the sections of a FairseqConfig that the plugin reads before training on two ranks."""
    return OmegaConf.create(
        {
            "common": {"cpu": True, "tpu": False, "bf16": False, "model_parallel_size": 1},
            "common_eval": {"path": None},
            "checkpoint": {"load_checkpoint_on_all_dp_ranks": False},
            "distributed_training": {
                "distributed_init_method": "tcp://localhost:1", "distributed_world_size": 2,
                "distributed_no_spawn": False, "ddp_backend": "legacy_ddp",
            },
            "model": model,
            "task": {},
        }
    )  # fmt: skip


def _called(cfg, original):
    return wrapped.call_main(original)(cfg, print)


def test_an_error_of_this_package_ends_a_command_but_an_unknown_error_is_raised():
    with pytest.raises(SystemExit) as end:
        _called(_training(), lambda *_: MoEConfig(8, 16, 4, top_k=5))
    assert str(end.value).startswith("error: top_k (--moe-top-k) is 5, but a token can choose from 4")
    with pytest.raises(ValueError, match="invalid literal"):
        _called(_training(), lambda *_: int("many"))


@pytest.mark.parametrize(
    ("words", "command"), [((), "train"), (("--config-name", "tiny_lm"), "hydra_train")]
)
def test_the_log_has_the_format_of_the_fairseq_command_that_runs(words, command, monkeypatch):
    """The first command of fairseq that a process imports sets the format of the log."""
    imported = []

    def import_module(name):
        imported.append(name)
        return SimpleNamespace(cli_main=lambda: None)

    monkeypatch.setattr(sys, "argv", ["train", *words])
    monkeypatch.setattr(train, "importlib", SimpleNamespace(import_module=import_module))
    train.main()
    assert imported == [f"fairseq_cli.{command}"]


def _refuse():
    """Raise a ValueError from a module of this package, with control characters in the message."""

    def refuse():
        raise ValueError("\x1b[31mred.pt is not a checkpoint;\ngive another.")

    FunctionType(refuse.__code__, {"__name__": "fairseq_tutel.anywhere"})()


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("wrapped_main", [True, False])
def test_the_last_line_of_a_failed_command_is_the_error(wrapped_main, debug, capsys, caplog, monkeypatch):
    """The log has the traceback only with LOGLEVEL=DEBUG."""
    caplog.set_level(logging.DEBUG)  # fairseq's wav2vec2 sets the root logger to DEBUG
    monkeypatch.setenv("LOGLEVEL", "DEBUG" if debug else "INFO")
    hook = excepthook(sys.__excepthook__)
    try:
        with refusals_are_sentences() if wrapped_main else contextlib.nullcontext():
            _refuse()
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    except ValueError as error:
        hook(type(error), error, error.__traceback__)
    sentence = "error: \\x1b[31mred.pt is not a checkpoint;\\ngive another."
    assert capsys.readouterr().err.splitlines() == [sentence]
    assert ("in _refuse\n" in caplog.text) == debug


class Endless:
    """An endless iterable, in which computing a batch takes a while."""

    def __len__(self):
        return 1000

    def __iter__(self):
        big = torch.ones(1000, 1000)
        while True:
            yield big @ big


def test_a_data_reader_thread_ends_even_if_the_buffer_is_full():
    batches = BufferedIterator(2, Endless())
    next(batches)
    end_readers()
    assert not batches._consumer.is_alive()
