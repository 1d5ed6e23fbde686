"""Starts a run: reads the ranks from torchrun's environment, checks options, and sets time-outs.

`complete` changes the FairseqConfig while fairseq builds the model; the Trainer later reads this object.
"""

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
from fairseq.optim import OPTIMIZER_REGISTRY
from omegaconf import OmegaConf, open_dict
from torch import nn

from fairseq_tutel import __version__
from fairseq_tutel.option import flag_of, plain, read, refuse_bad_values
from fairseq_tutel.parallel import guard, rendezvous
from fairseq_tutel.parallel.agreement import agree
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.feed_forward import named_stacks
from fairseq_tutel.plugin.optim.moe_optimizer import variant_name
from fairseq_tutel.plugin.optim.zero import zero_options
from fairseq_tutel.plugin.plans import check_together, plans_of
from fairseq_tutel.plugin.run_state import config_of, device_of
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)

# Optimizers whose update of an element depends on other elements, so shards would get wrong updates.
NOT_ELEMENTWISE = ("adafactor", "lamb", "composite")


def drop_tpu(cfg: Any) -> None:
    """Unset --tpu if the machine has no TPU, because fairseq-train treats --bf16 as a request for a TPU."""
    no_tpu = torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is None
    if cfg.common.tpu and cfg.common.bf16 and no_tpu:
        _set_everywhere(cfg, "tpu", False)


def _set_everywhere(cfg: Any, key: str, value: Any) -> None:
    """Set an option in every section of a FairseqConfig that has a copy of the option."""
    for section in cfg.values():
        if OmegaConf.is_dict(section) and key in section:
            section[key] = value


def join_torchrun(cfg: Any) -> None:
    """Read the rank, world size and GPU from torchrun's environment."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    world = int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1
    distributed = cfg.distributed_training
    on_cpu = not torch.cuda.is_available() or cfg.common.cpu
    if distributed.distributed_init_method is not None or world <= 1:
        return
    with open_dict(distributed):
        distributed.distributed_init_method = "env://"
        distributed.distributed_world_size = world
        distributed.distributed_rank = int(os.environ["RANK"])
        distributed.distributed_no_spawn = True
        distributed.device_id = 0 if on_cpu else rendezvous.own_gpu()
        distributed.distributed_num_procs = 1
        if on_cpu:
            distributed.distributed_backend = "gloo"
            # "pytorch_ddp" and "c10d" are names of fairseq's default backend, which needs a GPU.
            if distributed.ddp_backend in ("pytorch_ddp", "c10d"):
                _set_everywhere(cfg, "ddp_backend", "legacy_ddp")
    if not on_cpu:
        torch.cuda.set_device(distributed.device_id)


def note_spawned_ranks(cfg: Any) -> None:
    """Record how many ranks fairseq spawned on each node; no environment variable has this number."""
    distributed = cfg.distributed_training
    spawned = distributed.distributed_init_method is not None and not distributed.distributed_no_spawn
    count = min(distributed.distributed_num_procs, distributed.distributed_world_size) if spawned else 0
    rendezvous.set_spawned_ranks(count)


def meeting_of(cfg: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager for the rendezvous, in which all ranks find each other at the start.

    The context manager does nothing if this process is the only rank or spawns all ranks.
    """
    distributed = cfg.distributed_training
    if distributed.distributed_init_method is None or not distributed.distributed_no_spawn:
        return contextlib.nullcontext()
    set_timeout(cfg.task)
    seconds = read(TaskConfig, cfg.task).moe_comm_timeout
    return rendezvous.meeting(distributed.distributed_rank, distributed.distributed_world_size, seconds)


# These options describe one rank, so ranks may have different values. Options with a path may differ, too.
OF_ONE_RANK = {
    *("distributed_rank", "device_id", "shard_id", "distributed_init_method", "distributed_port"),
    *("distributed_no_spawn", "distributed_num_procs", "nprocs_per_node"),
}
# Sections of fairseq's configuration that training does not read.
OF_OTHER_COMMANDS = {"common_eval", "generation", "eval_lm", "interactive"}


def start_together(root: Any, model: nn.Module, task: Any) -> None:
    """Check that all ranks have equal options, and set the time-out of collectives. Collective."""
    set_timeout(config_of(task))
    if dist.is_initialized():
        check_together(config_of(task))
        agree(_facts_of(root, model, task))
        limit_fairseq_groups()
        allocate_gather_buffers(root)


def set_timeout(task_cfg: Any) -> None:
    """Set the time-out of all later process groups from --moe-comm-timeout."""
    options = read(TaskConfig, task_cfg)
    refuse_bad_values(options)
    guard.set_timeout(options.moe_comm_timeout)


def limit_fairseq_groups() -> None:
    """Create fairseq's group of all ranks now, with --moe-comm-timeout as its time-out. Collective."""
    guard.limit(None)
    with guard.guarded("the creation of fairseq's group of all ranks"):
        guard.limit(distributed_utils.get_global_group())


def allocate_gather_buffers(cfg: Any) -> None:
    """Allocate the buffers of fairseq's all_gather_list in host memory if the run uses no GPU."""
    if device_of(cfg).type == "cpu":
        size, gather = cfg.common.all_gather_list_size, distributed_utils.all_gather_list
        gather._buffer = torch.empty(size * dist.get_world_size(), dtype=torch.uint8)
        gather._cpu_buffer = torch.empty(size, dtype=torch.uint8)


def _facts_of(root: Any, model: nn.Module, task: Any) -> dict[str, Any]:
    """Return a dict of all options and facts that must be equal on all ranks.

    These options and facts decide tensor shapes, the order of collectives, and the results.
    """
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    facts = {
        "the model's number of parameters": sum(p.numel() for p in model.parameters()),
        "the digest of the model's parameter shapes": _digest(shapes),
        "the kind of device": device_of(root).type,
        "the version of fairseq_tutel": __version__,
        "the version of fairseq": fairseq_version,
        "the version of torch": torch.__version__,
    }
    for name in root:
        if name not in OF_OTHER_COMMANDS:
            facts |= _options(root[name])
    for side in ("source_dictionary", "target_dictionary"):
        words = getattr(getattr(task, side, None), "symbols", None)
        facts[f"the digest of the {side.replace('_', ' ')}"] = _digest(words)
    for each in plans_of(config_of(task)):
        facts[f"the digest of the plan {each.name}"] = each.plan.digest
    return facts


def _options(section: Any) -> dict[str, Any]:
    """Return those options of a configuration section that must be equal on all ranks, by flag."""
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


# fairseq options that treat experts of different ranks as replicas, skip an update on one rank only, or
# write files in place. Each entry of BREAK_EXPERTS has the section, the option, refused values, and the
# fix.
BREAK_EXPERTS = (
    ("distributed_training", "ddp_backend", ("fully_sharded", "slowmo"), "give legacy_ddp"),
    ("distributed_training", "zero_sharding", ("os",), "give --moe-zero-stage instead"),
    ("checkpoint", "write_checkpoints_asynchronously", (True,), "give --moe-save-async instead"),
    ("optimization", "use_bmuf", (True,), "remove it"),
    ("common", "amp", (True,), "give --bf16 or --fp16"),
)


def refuse_stock_options(cfg: Any) -> None:
    """Raise an error for fairseq options that do not work with experts."""
    for section, key, refused, fix in BREAK_EXPERTS:
        value = plain(cfg[section][key])
        if value in refused:
            raise ValueError(f"{flag_of(key)} is {value}, which does not work with experts; {fix}.")


def refuse_run(
    root: Any, model: nn.Module, topology: Topology, in_step: bool, sliced: bool, ahead: int
) -> None:
    """Raise an error if the options of a training run do not work with experts.

    `model` is the stock model before its FFNs are replaced. `in_step` is true if MoE layers communicate
    even when each rank holds all experts. `sliced` is true if a rank holds only shards of experts. `ahead`
    is the value of the option --moe-pregate.
    """
    refuse_stock_options(root)
    common, options, zero = root.common, read(TaskConfig, root.task), zero_options(root)
    name, dropped, shares = (
        str(root.optimizer._name or ""),
        _layerdrop_of(model),
        topology.expert_parallel_size > 1,
    )
    # A layer that fairseq recomputes has the attribute `precheckpoint_forward`.
    recomputes = any(hasattr(module, "precheckpoint_forward") for module in model.modules())
    local_drop = float(getattr(root.model, "moe_local_drop", 0.0))
    half = next((key for key in ("memory_efficient_fp16", "fp16") if common[key]), "")
    without_masters = ("memory_efficient_fp16", "memory_efficient_bf16")
    not_with_zero = next((key for key in without_masters if zero and common[key]), "")
    needs_whole = ""
    if sliced and local_drop > 0:
        needs_whole = f"--moe-local-drop is {local_drop}"
    elif (zero or (shares and sliced)) and getattr(root.optimizer, "fp16_adam_stats", False):
        needs_whole = "--fp16-adam-stats is set"
    elif (zero or shares) and name.removeprefix("moe_") in NOT_ELEMENTWISE:
        needs_whole = f"--optimizer is {name}"
    rules = [
        (not name, "--optimizer is not given; choose one, such as moe_adam."),
        (
            half and device_of(root).type == "cpu",
            f"{flag_of(half)} is set on a CPU, but needs a GPU; remove it.",
        ),
        (
            options.moe_save_async and options.moe_checkpoint != "sharded",
            "--moe-save-async is set, which needs --moe-checkpoint sharded; add it.",
        ),
        (
            dropped and (shares or (in_step and topology.world_size > 1)),
            f"{dropped}, so ranks would drop different layers and wait for each other for ever; set it to "
            "0, or give --moe-expert-parallel-size 1 and no gshard_global in --moe-balance-loss.",
        ),
        (
            ahead and (recomputes or dropped),
            f"--moe-pregate is {ahead}, so gates read the input of an earlier layer, which must be neither "
            "dropped nor recomputed alone; remove layerdrop and --checkpoint-activations, or this option.",
        ),
        (
            needs_whole,
            f"{needs_whole}, which needs complete experts and parameters, but ranks hold only parts of "
            "them; remove it, or give --moe-expert-parallel-size 1 without ZeRO and offload.",
        ),
        (
            not_with_zero,
            f"{flag_of(not_with_zero)} is set, which does not work with --moe-zero-stage and "
            "--moe-offload-optimizer; use --fp16 or --bf16.",
        ),
    ]
    for condition, message in rules:
        if condition:
            raise ValueError(message)


def _layerdrop_of(model: nn.Module) -> str:
    """Return a model's LayerDrop option, such as "--encoder-layerdrop is 0.1", or "" without LayerDrop."""
    for side, name, layers in named_stacks(model):
        # fairseq's LayerDropModuleList has the drop probability, but in wav2vec2, the parent module has it.
        owner = model.get_submodule(name.rpartition(".")[0])
        value = getattr(layers, "p", getattr(owner, "layerdrop", 0.0))
        if value > 0:
            return f"--{side}-layerdrop is {value}"
    return ""


def complete(root: Any) -> None:
    """Change options of the FairseqConfig that do not work with experts, in place, and log every change."""
    # If memory_efficient_fp16 is set, fairseq-train sets fp16, but fairseq-hydra-train trains in fp32.
    for precision in ("fp16", "bf16"):
        if root.common[f"memory_efficient_{precision}"]:
            _set(root.common, precision, True)
    zero = zero_options(root)
    only = read(TaskConfig, root.task).moe_train_only
    if only or (zero is not None and zero.stage):
        # torch's DistributedDataParallel all-reduces complete gradients, which ZeRO must avoid. It also
        # refuses a model if --moe-train-only freezes all of its dense parameters.
        _set(root.distributed_training, "ddp_backend", "legacy_ddp", "frozen parts" if only else "shards")
        _set_everywhere(root, "ddp_backend", "legacy_ddp")
    name, variant = root.optimizer._name, variant_name(root.optimizer._name)
    if variant != name and variant in OPTIMIZER_REGISTRY:
        logger.info("replaced the optimizer %s by %s, which supports experts", name, variant)
        root.optimizer._name = variant
        if hasattr(root.optimizer, "optimizer"):
            root.optimizer.optimizer = variant
    if root.common.fp16:
        # In one flat tensor of all gradients, the gradients of experts could not be identified.
        _set(root.common, "fp16_no_flatten_grads", True)


def _set(cfg: Any, key: str, value: Any, needed_by: str = "experts") -> None:
    if cfg[key] != value:
        shown = "" if value is True else f" {value}"
        logger.info("set %s%s, because %s need it", flag_of(key), shown, needed_by)
        cfg[key] = value
