"""What a process needs before fairseq's main runs in it: its place among torchrun's ranks, and bf16.

And how it ends where a run cannot work.
"""

import contextlib
import dis
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict

from fairseq_tutel.ranks import guard
from fairseq_tutel.ranks.launcher import own_gpu
from fairseq_tutel.ranks.rendezvous import meeting

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def refusals_are_sentences() -> Iterator[None]:
    """End this process with the sentence of a refusal alone; LOGLEVEL=DEBUG shows where it is from.

    A refusal is a ValueError that a `raise` of our own code raised. Those of other code pass, and those of
    our mistakes, such as a tuple of another length, with their traceback.
    """
    try:
        yield
    except ValueError as error:
        trace: Any = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        frame = trace.tb_frame
        is_ours = frame.f_globals["__name__"].partition(".")[0] == __name__.partition(".")[0]
        if not is_ours or frame.f_code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
            raise
        logger.debug("refused here", exc_info=error)
        sys.exit(f"error: {error}")


def read_on_every_rank(cfg: Any) -> None:
    """Let every rank of a training read the checkpoint that it goes on from.

    Stock broadcasts rank 0's through an unpickler that torch >= 2.6 refuses.
    """
    key = "load_checkpoint_on_all_dp_ranks"
    if cfg.distributed_training.distributed_world_size > 1 and not cfg.checkpoint[key]:
        logger.info("set --load-checkpoint-on-all-dp-ranks, which torch >= 2.6 needs")
        cfg.checkpoint[key] = True


def drop_tpu(cfg: Any) -> None:
    """Let --bf16 mean bf16; fairseq-train takes it for a wish to run on a TPU too."""
    no_tpu = torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is None
    if cfg.common.tpu and cfg.common.bf16 and no_tpu:
        for section in cfg.values():
            if OmegaConf.is_dict(section) and "tpu" in section:
                section.tpu = False


def join_torchrun(cfg: Any) -> None:
    """Read rank and world size from torchrun's environment where stock cannot."""
    distributed, world = cfg.distributed_training, _torchrun_world_size()
    on_cpu = not torch.cuda.is_available() or cfg.common.cpu
    stock_works = not on_cpu and distributed.distributed_world_size > 1
    if distributed.distributed_init_method is not None or world <= 1 or stock_works:
        return
    with open_dict(distributed):
        distributed.distributed_init_method = "env://"
        distributed.distributed_world_size = world
        distributed.distributed_rank = int(os.environ["RANK"])
        distributed.distributed_no_spawn = True
        distributed.device_id = 0 if on_cpu else own_gpu()
        distributed.distributed_num_procs = 1
        if on_cpu:
            distributed.distributed_backend = "gloo"
            # The default, which needs a GPU, by its two names; what else was asked for is kept, or refused.
            if distributed.ddp_backend in ("pytorch_ddp", "c10d"):
                distributed.ddp_backend = "legacy_ddp"
    if not on_cpu:
        torch.cuda.set_device(distributed.device_id)


def _torchrun_world_size() -> int:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def meeting_of(cfg: Any) -> contextlib.AbstractContextManager[Any]:
    """Return what this process meets the others in; nothing where it is alone, or spawns them."""
    distributed = cfg.distributed_training
    if distributed.distributed_init_method is None or not distributed.distributed_no_spawn:
        return contextlib.nullcontext()
    seconds = getattr(cfg.task, "moe_comm_timeout", 0)
    return meeting(
        distributed.distributed_rank,
        distributed.distributed_world_size,
        seconds if guard.is_time(seconds) else 0,  # refused later, by its name
    )
