"""The start of a run: ranks from torchrun's environment, compared options, time-outs of collectives."""

import argparse
import contextlib
import hashlib
import importlib.util
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from fairseq import __version__ as fairseq_version
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf, open_dict
from torch import nn

from fairseq_tutel import __version__
from fairseq_tutel.moe.run_options import TaskConfig
from fairseq_tutel.options.option import flag_of, read
from fairseq_tutel.plugin.plans import check_together, plans_of
from fairseq_tutel.plugin.run_state import config_of, device_of
from fairseq_tutel.ranks import guard
from fairseq_tutel.ranks.agreement import agree
from fairseq_tutel.ranks.rendezvous import meeting, own_gpu

logger = logging.getLogger(__name__)


def read_on_every_rank(cfg: Any) -> None:
    """Let every rank read the checkpoint that training resumes from.

    fairseq broadcasts rank 0's through an unpickler that torch >= 2.6 refuses.
    """
    key = "load_checkpoint_on_all_dp_ranks"
    if cfg.distributed_training.distributed_world_size > 1 and not cfg.checkpoint[key]:
        logger.info("set --load-checkpoint-on-all-dp-ranks, which torch >= 2.6 needs")
        cfg.checkpoint[key] = True


def drop_tpu(cfg: Any) -> None:
    """Unset --tpu where no TPU is: fairseq-train treats --bf16 as a request for a TPU, too."""
    no_tpu = torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is None
    if cfg.common.tpu and cfg.common.bf16 and no_tpu:
        for section in cfg.values():
            if OmegaConf.is_dict(section) and "tpu" in section:
                section.tpu = False


def join_torchrun(cfg: Any) -> None:
    """Read rank and world size from torchrun's environment where fairseq cannot."""
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
            # The default, which needs a GPU, has two names. Another backend that was given is kept or
            # refused.
            if distributed.ddp_backend in ("pytorch_ddp", "c10d"):
                distributed.ddp_backend = "legacy_ddp"
    if not on_cpu:
        torch.cuda.set_device(distributed.device_id)


def _torchrun_world_size() -> int:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def meeting_of(cfg: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the rendezvous; an empty one if this process is alone or spawns ranks."""
    distributed = cfg.distributed_training
    if distributed.distributed_init_method is None or not distributed.distributed_no_spawn:
        return contextlib.nullcontext()
    seconds = read(TaskConfig, cfg.task).moe_comm_timeout
    return meeting(
        distributed.distributed_rank,
        distributed.distributed_world_size,
        seconds if guard.is_time(seconds) else 0,  # a bad value is refused later, by name
    )


# Options that may differ between ranks: position, files, loading and logging. Paths may differ, too.
OF_ONE_RANK = {
    *("distributed_rank", "device_id", "shard_id", "distributed_init_method", "distributed_port"),
    *("distributed_no_spawn", "distributed_num_procs", "nprocs_per_node", "heartbeat_timeout"),
    *("data", "save_dir", "restore_file", "finetune_from_model", "user_dir", "num_workers"),
    *("num_workers_valid", "data_buffer_size", "dataset_impl", "use_plasma_view", "plasma_path"),
    *("no_progress_bar", "log_interval", "log_format", "log_file", "tensorboard_logdir"),
    *("wandb_project", "azureml_logging", "aim_repo", "aim_run_hash", "profile", "reset_logging"),
    *("suppress_crashes", "empty_cache_freq", "keep_last_epochs", "keep_best_checkpoints"),
    *("keep_interval_updates", "keep_interval_updates_pattern"),
}
# Sections of fairseq's configuration that training does not read.
OF_OTHER_COMMANDS = {"common_eval", "generation", "eval_lm", "interactive"}


def start_together(root: Any, model: nn.Module, task: Any) -> None:
    """Compare all ranks' options, and set the time-out of their collectives."""
    set_timeout(config_of(task))
    if not dist.is_initialized():
        return
    check_together(config_of(task))
    agree(facts_of(root, model, task))
    limit_fairseq_groups()
    allocate_gather_buffers(root)


def set_timeout(task_cfg: Any) -> None:
    """Set the time-out of groups that are created from now on."""
    guard.set_timeout(read(TaskConfig, task_cfg).moe_comm_timeout)


def limit_fairseq_groups() -> None:
    """Set the time-out of fairseq's own groups. Collective."""
    # fairseq creates a group for gradients and logs later, with torch's default time-out.
    operation = "the creation of fairseq's group of all ranks"
    with guard.watched(operation), guard.guarded(operation):
        of_fairseq = distributed_utils.get_global_group()
    for group in (None, of_fairseq):
        guard.limit(group)


def allocate_gather_buffers(cfg: Any) -> None:
    """On a CPU, give fairseq's all_gather_list, which allocates on a GPU, its two buffers."""
    if not torch.cuda.is_available():
        size, gather = cfg.common.all_gather_list_size, distributed_utils.all_gather_list
        gather._buffer = torch.empty(size * dist.get_world_size(), dtype=torch.uint8)
        gather._cpu_buffer = torch.empty(size, dtype=torch.uint8)


def facts_of(root: Any, model: nn.Module, task: Any) -> dict[str, Any]:
    """Return by option or description everything that decides shapes, collectives and results."""
    facts: dict[str, Any] = {}
    for name in root:
        if name not in OF_OTHER_COMMANDS:
            facts |= _options(root[name])
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    facts["the model's number of parameters"] = sum(p.numel() for p in model.parameters())
    facts["the digest of the model's parameter shapes"] = _digest(shapes)
    for side in ("source_dictionary", "target_dictionary"):
        words = getattr(getattr(task, side, None), "symbols", None)
        facts[f"the digest of the {side.replace('_', ' ')}"] = _digest(words)
    for each in plans_of(config_of(task)):
        facts[f"the digest of the plan {each.name}"] = each.plan.digest
    facts["the kind of device"] = device_of(root).type
    facts["the version of fairseq_tutel"] = __version__
    facts["the version of fairseq"] = fairseq_version
    facts["the version of torch"] = torch.__version__
    return facts


def _options(section: Any) -> dict[str, Any]:
    """Return a section's options that ranks must share, as flags."""
    if OmegaConf.is_config(section):
        section = OmegaConf.to_container(section, resolve=True, enum_to_str=True)
    elif isinstance(section, argparse.Namespace):
        section = vars(section)
    if not isinstance(section, dict):
        return {}
    return {
        flag_of(key): value
        for key, value in section.items()
        if key not in OF_ONE_RANK and not key.startswith("_") and "/" not in str(value)
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
