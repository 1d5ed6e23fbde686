"""The configuration of the whole run, as the task sees it: checked and completed before training.

While the model is built, the root of the task's configuration is the FairseqConfig that the Trainer
will use. A task without a dataclass has the plain command line, which knows no root: the run keeps it.
"""

import argparse
import logging
import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, gen_parser_from_dataclass
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.utils import import_user_module
from omegaconf import OmegaConf
from torch import nn

from fairseq_tutel import plugin
from fairseq_tutel.moe.config import TaskConfig, options_of
from fairseq_tutel.moe.options import flag_of, plain, read
from fairseq_tutel.optim.moe_optimizer import twin_name
from fairseq_tutel.optim.zero import NOT_ELEMENTWISE, refuse_with_zero, zero_options
from fairseq_tutel.plugin.feed_forward import named_stacks
from fairseq_tutel.plugin.opening.literals import options_within
from fairseq_tutel.plugin.registration.flags import SystemOptions
from fairseq_tutel.plugin.registration.task_options import give_system_options
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Topology

logger = logging.getLogger(__name__)


def config_of(task: Any) -> Any:
    """Return a task's configuration; fairseq's older tasks keep it in `args`."""
    cfg = getattr(task, "cfg", None)
    return getattr(task, "args", None) if cfg is None else cfg


_running: list[Any] = []


def run_with_root(main: Any, cfg: Any, **kwargs: Any) -> Any:
    """Run fairseq's `main` while its FairseqConfig is kept; a user's tasks are there before."""
    import_user_module(cfg.common)  # as hydra needs
    # A spawned rank has imported this file, so fairseq passes over a --user-dir that is the package.
    plugin.register()
    plugin.flags_were_known()
    give_system_options()
    _refuse_nan(cfg)
    _say_what_has_no_effect(cfg)
    _running[:] = [cfg]
    try:
        return main(cfg, **kwargs)
    finally:
        _running.clear()


def _refuse_nan(cfg: Any) -> None:
    """Refuse NaN as the value of any option: stock compares with it, which is false without an error."""
    for key, value in options_within(cfg):
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise ValueError(f"{flag_of(key)} is nan; give a number, or leave it out.")


def _say_what_has_no_effect(cfg: Any) -> None:
    """Warn of system options in the training of a dense model: every task takes them."""
    name = getattr(cfg.model, "ensemble_arch", None) or getattr(cfg.model, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name))
    has_experts = getattr(model, "has_experts", model is None)
    if cfg.common_eval.path is not None or has_experts or cfg.distributed_training.distributed_rank:
        return
    _warn_of_given(cfg.task, f"--arch {name}")


def say_what_has_no_effect_on(path: str, state: Any) -> None:
    """Warn of system options on the command line that opens a dense checkpoint for use.

    Stock's tasks give dense models no hook, so the options are read from the command line.
    """
    is_used_by_training = bool(_running) and _running[0].common_eval.path is None
    has_experts = any(".experts." in name for name in state.get("model") or ())
    if has_experts or is_used_by_training or not plugin.has_user_dir(sys.argv):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    gen_parser_from_dataclass(parser, SystemOptions())
    if world.is_first():
        _warn_of_given(parser.parse_known_args(sys.argv[1:])[0], path)


def _warn_of_given(task_cfg: Any, dense: str) -> None:
    for option in options_of("task"):
        value = plain(getattr(task_cfg, option.key, option.default))
        if value != option.default and not option.of_any_training:
            logger.warning("%s %s has no effect: %s has no experts", option.flag, value, dense)


def root_of(task: Any) -> Any:
    """Return the run's FairseqConfig, or None where the task was built outside of one."""
    cfg = config_of(task)
    root = cfg._get_root() if hasattr(cfg, "_get_root") else None
    if root is None or "distributed_training" not in root:
        return _running[0] if _running else None
    return root


def saves_shards(task: Any) -> bool:
    """Whether --moe-checkpoint is sharded."""
    return read(TaskConfig, config_of(task)).moe_checkpoint == "sharded"


# In what a configuration says of itself, of one that comes out of a file.
OPENED = "opened_for_use"


def mark_as_opened(state: Any) -> None:
    """Let `is_training` know the configuration of a checkpoint that is opened for use, in place."""
    if state.get("args") is not None:  # of an older file: stock makes the configuration of it later
        state["cfg"], state["args"] = convert_namespace_to_omegaconf(state["args"]), None
    if OmegaConf.is_config(state.get("cfg")):
        state["cfg"]._set_flag(OPENED, True)  # what is below it has it too
    model = (state.get("cfg") or {}).get("model")
    if isinstance(model, argparse.Namespace):
        setattr(model, OPENED, True)


def is_training(task: Any, model_cfg: Any) -> bool:
    """Whether the model that is being built is to be trained, not opened from a checkpoint.

    The other commands, and Python code that opens a file, run with all experts on every rank, since
    their batches differ in number between ranks.

    Args:
        task: of the model.
        model_cfg: what the model is built from.
    """
    return not is_opened(model_cfg) and root_of(task) is not None


def is_opened(model_cfg: Any) -> bool:
    """Whether a model's configuration comes out of a checkpoint, whose tensors will be loaded."""
    of_file = model_cfg._get_flag(OPENED) if OmegaConf.is_config(model_cfg) else None
    return bool(of_file or getattr(model_cfg, OPENED, False))


def device_of(root: Any) -> torch.device:
    """Return the kind of device that the run will use."""
    on_gpu = torch.cuda.is_available() and not (root is not None and root.common.cpu)
    return torch.device("cuda" if on_gpu else "cpu")


def refuse_run(
    root: Any, model: nn.Module, topology: Topology, in_step: bool, sliced: bool, ahead: int
) -> None:
    """Refuse a training that experts cannot work in.

    Args:
        root: the FairseqConfig of the training.
        model: the stock model, before its FFNs are replaced.
        topology: where experts will live.
        in_step: whether layers talk across ranks even where each holds all experts.
        sliced: whether ranks hold slices of experts.
        ahead: --moe-pregate.

    Raises:
        ValueError: naming option, value and fix.
    """
    world = root.distributed_training.distributed_world_size
    _refuse_unrelated_trainings()
    _refuse_options(root, world, on_gpu=device_of(root).type == "cuda")
    if topology.expert_parallel_size > 1 or (in_step and topology.world_size > 1):
        _refuse_layerdrop(
            model,
            "ranks would drop different layers and wait for each other for ever; set it to 0, or "
            "--moe-expert-parallel-size to 1 and no gshard_global in --moe-balance-loss",
        )
    if ahead:
        _refuse_with_pregating(model, ahead)
    if topology.expert_parallel_size > 1:
        _refuse_for_shared_experts(root, sliced)
    zero = zero_options(root)
    if zero is not None:
        refuse_with_zero(root, zero)


def complete(root: Any) -> None:
    """Set what experts need of a training, in place; every change is logged once.

    Args:
        root: the FairseqConfig of the training.
    """
    # On the command line fairseq itself concludes this; under hydra the run would be in fp32.
    for precision in ("fp16", "bf16"):
        if root.common[f"memory_efficient_{precision}"]:
            _set(root.common, precision, True)
    zero = zero_options(root)
    if zero is not None and zero.stage:
        # torch's own would all-reduce whole gradients during the backward.
        _set(root.distributed_training, "ddp_backend", "legacy_ddp", "shards")
    _use_twin_optimizer(root)
    if root.common.fp16:
        # One flat tensor of all gradients would lose which of them are experts'.
        _set(root.common, "fp16_no_flatten_grads", True)


def _set(cfg: Any, key: str, value: Any, needed_by: str = "experts") -> None:
    if cfg[key] != value:
        shown = "" if value is True else f" {value}"
        logger.info("set %s%s, which %s need", flag_of(key), shown, needed_by)
        cfg[key] = value


def _refuse_unrelated_trainings() -> None:
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and not dist.is_initialized():
        raise ValueError(
            f"WORLD_SIZE is {launched} in the environment, but this process would train alone and "
            "overwrite the others' checkpoints; start it with `torchrun … -m fairseq_tutel.train`."
        )


def refuse_backend(distributed: Any) -> None:
    """Refuse what wraps a model so that experts are no longer each rank's own.

    Args:
        distributed: that part of the FairseqConfig of a training.
    """
    backend = str(distributed.ddp_backend)
    if backend in ("fully_sharded", "slowmo"):
        raise ValueError(
            f"--ddp-backend is {backend}, which would shard or average experts as if they were "
            "replicas; use legacy_ddp, or pytorch_ddp on a GPU."
        )


def _refuse_options(root: Any, world: int, on_gpu: bool) -> None:
    distributed, common = root.distributed_training, root.common
    refuse_backend(distributed)
    backend = str(distributed.ddp_backend)
    bad = [
        (
            world > 1 and not on_gpu and backend not in ("legacy_ddp", "no_c10d"),
            f"--ddp-backend is {backend}, which needs a GPU; add --ddp-backend legacy_ddp.",
        ),
        (
            world > 1 and root.ema.store_ema,
            "--store-ema is set on several ranks, where the moving average of remote experts is not "
            "kept; drop it or train on one rank.",
        ),
        (
            not on_gpu and (common.fp16 or common.memory_efficient_fp16),
            f"--{'memory-efficient-' if common.memory_efficient_fp16 else ''}fp16 is set on a CPU, where "
            "fairseq's fp16 needs a GPU; drop it.",
        ),
        (
            not on_gpu and common.amp,
            "--amp is set on a CPU, where fairseq's amp needs a GPU; drop it.",
        ),
        (
            common.model_parallel_size > 1,
            f"--model-parallel-size is {common.model_parallel_size}, which does not compose with "
            "experts; set it to 1.",
        ),
        (
            distributed.pipeline_model_parallel,
            "--pipeline-model-parallel is set, which does not compose with experts; drop it.",
        ),
        (
            str(distributed.zero_sharding) != "none",
            f"--zero-sharding is {distributed.zero_sharding}, which would shard experts as if they "
            "were replicas; set it to none and give --moe-zero-stage instead.",
        ),
        (
            read(TaskConfig, root.task).moe_checkpoint == "sharded"
            and PathManager.path_requires_pathmanager(root.checkpoint.save_dir),
            f"--save-dir is {root.checkpoint.save_dir}, which is no folder of this machine, and "
            "--moe-checkpoint is sharded, which writes into one; give a folder, or full.",
        ),
        (
            root.checkpoint.write_checkpoints_asynchronously,
            "--write-checkpoints-asynchronously is set, which writes files in place, so that a kill leaves "
            "a torn one; drop it.",
        ),
        (
            not (root.optimizer and root.optimizer._name),
            "--optimizer is not given; choose one, such as moe_adam.",
        ),
        (
            world > 1 and root.optimization.use_bmuf,
            "--use-bmuf is set, which averages experts as if they were replicas; drop it.",
        ),
    ]
    for wrong, message in bad:
        if wrong:
            raise ValueError(message)


def _refuse_with_pregating(model: nn.Module, ahead: int) -> None:
    if any(hasattr(module, "precheckpoint_forward") for module in model.modules()):
        raise ValueError(
            f"--moe-pregate is {ahead} and --checkpoint-activations is set, which makes a layer again in "
            "the backward without the earlier one whose input its gate sees; drop one of them "
            "(--moe-recompute-experts saves memory beside --moe-pregate)."
        )
    _refuse_layerdrop(
        model,
        f"--moe-pregate {ahead} lets a layer's gate see the input of another, and either may be dropped; "
        "set one of them to 0",
    )


def _refuse_layerdrop(model: nn.Module, reason: str) -> None:
    for side, name, layers in named_stacks(model):
        # A LayerDropModuleList has it, or what holds wav2vec2's layers.
        held_by = model.get_submodule(name.rpartition(".")[0])
        value = getattr(layers, "p", getattr(held_by, "layerdrop", 0.0))
        if value > 0:
            raise ValueError(f"--{side}-layerdrop is {value}: {reason}.")


def _refuse_for_shared_experts(root: Any, sliced: bool) -> None:
    name = root.optimizer._name
    if sliced and getattr(root.optimizer, "fp16_adam_stats", False):
        raise ValueError(
            "--fp16-adam-stats is set, whose scales hold for a whole expert, and ranks hold slices of one; "
            "drop it, or give --moe-expert-parallel-size a divisor of the experts."
        )
    if name.removeprefix("moe_") in NOT_ELEMENTWISE:
        raise ValueError(
            f"--optimizer is {name}, whose updates look at all experts of a layer at once, and ranks "
            "hold a part of them each; use moe_adam, or --moe-expert-parallel-size 1."
        )


def _use_twin_optimizer(root: Any) -> None:
    name = root.optimizer._name
    twin = twin_name(name)
    if twin != name and twin in OPTIMIZER_REGISTRY:
        logger.info("optimizer %s becomes %s, which knows experts", name, twin)
        root.optimizer._name = twin
        if hasattr(root.optimizer, "optimizer"):  # fairseq's older ones have the whole command line
            root.optimizer.optimizer = twin
