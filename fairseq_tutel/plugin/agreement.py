"""Before the first collective of a training: every rank was started alike, and none waits for ever."""

import argparse
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from fairseq import __version__ as fairseq_version
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf
from torch import nn

from fairseq_tutel import __version__
from fairseq_tutel.plugin.flags import SystemOptions, defaults
from fairseq_tutel.plugin.run_config import config_of, device_of
from fairseq_tutel.ranks import guard
from fairseq_tutel.ranks.agreement import agree

# What a rank may have of its own: its place, its files, how it loads and logs. Paths may differ too.
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
    """Compare what all ranks were started with, and set the time-out of their collectives.

    Args:
        root: the FairseqConfig of a training.
        model: the stock model, before its FFNs are replaced.
        task: the fairseq task.

    Raises:
        ValueError: ranks differ, or --moe-comm-timeout is no time.
        CommunicationError: a rank did not come within --moe-comm-timeout.
    """
    set_timeout(config_of(task))
    if not (dist.is_available() and dist.is_initialized()):
        return
    agree(facts_of(root, model, task))
    limit_fairseqs_own()


def set_timeout(task_cfg: Any) -> None:
    """Give the groups that are made from now on the time-out of a task's configuration.

    Raises:
        ValueError: --moe-comm-timeout is no time.
    """
    key = "moe_comm_timeout"
    guard.set_timeout(getattr(task_cfg, key, defaults(SystemOptions)[key]))


def limit_fairseqs_own() -> None:
    """Give fairseq's groups the time-out too. Collective."""
    # fairseq makes a group of its own for gradients and logs, later, with torch's own time-out.
    operation = "the creation of fairseq's group of all ranks"
    with guard.watched(operation), guard.guarded(operation):
        of_fairseq = distributed_utils.get_global_group()
    for group in (None, of_fairseq):
        guard.limit(group)


def facts_of(root: Any, model: nn.Module, task: Any) -> dict[str, Any]:
    """Return all that decides shapes, collectives and results, by option or by what it is."""
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
        f"--{key.replace('_', '-')}": value
        for key, value in section.items()
        if key not in OF_ONE_RANK and not key.startswith("_") and "/" not in str(value)
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
