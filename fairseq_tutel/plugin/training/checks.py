"""Checks of the configuration, and the settings that experts need, before training starts.

While the model is built, the root of the task's configuration is the FairseqConfig that the Trainer uses.
"""

import logging
import os
from typing import Any

import torch.distributed as dist
from fairseq.file_io import PathManager
from fairseq.optim import OPTIMIZER_REGISTRY
from torch import nn

from fairseq_tutel.moe.option_table import TaskConfig
from fairseq_tutel.optim.moe_optimizer import variant_name
from fairseq_tutel.optim.zero import NOT_ELEMENTWISE, refuse_first, refuse_with_zero, zero_options
from fairseq_tutel.options.option import flag_of, read
from fairseq_tutel.plugin.feed_forward import named_stacks
from fairseq_tutel.plugin.run_state import config_of, device_of
from fairseq_tutel.ranks.groups import Topology

logger = logging.getLogger(__name__)


def saves_shards(task: Any) -> bool:
    """Whether --moe-checkpoint is sharded."""
    return read(TaskConfig, config_of(task)).moe_checkpoint == "sharded"


def refuse_run(
    root: Any, model: nn.Module, topology: Topology, in_step: bool, sliced: bool, ahead: int
) -> None:
    """Refuse training that cannot work with experts.

    Args:
        root: the FairseqConfig of the run.
        model: the stock model, before its FFNs are replaced.
        topology: of this rank.
        in_step: layers communicate even where each rank holds all experts.
        sliced: ranks hold shards of experts.
        ahead: --moe-pregate.
    """
    _refuse_unrelated_runs()
    _refuse_options(root, on_gpu=device_of(root).type == "cuda")
    if topology.expert_parallel_size > 1 or (in_step and topology.world_size > 1):
        _refuse_layerdrop(
            model,
            "ranks would drop different layers and wait for each other for ever; set it to 0, or "
            "--moe-expert-parallel-size to 1 and no gshard_global in --moe-balance-loss",
        )
    if ahead:
        _refuse_with_pregating(model, ahead)
    if topology.expert_parallel_size > 1:
        _refuse_with_expert_parallelism(root, sliced)
    zero = zero_options(root)
    if zero is not None:
        refuse_with_zero(root, zero)


def complete(root: Any) -> None:
    """Set what experts need in the FairseqConfig, in place; log every change once."""
    # fairseq-train concludes this itself; under hydra the run would be in fp32.
    for precision in ("fp16", "bf16"):
        if root.common[f"memory_efficient_{precision}"]:
            _set(root.common, precision, True)
    zero = zero_options(root)
    if zero is not None and zero.stage:
        # torch's wrapper would all-reduce whole gradients during the backward pass.
        _set(root.distributed_training, "ddp_backend", "legacy_ddp", "shards")
    _use_moe_optimizer(root)
    if root.common.fp16:
        # One flat tensor of all gradients would not show which of them are experts'.
        _set(root.common, "fp16_no_flatten_grads", True)


def _set(cfg: Any, key: str, value: Any, needed_by: str = "experts") -> None:
    if cfg[key] != value:
        shown = "" if value is True else f" {value}"
        logger.info("set %s%s, which %s need", flag_of(key), shown, needed_by)
        cfg[key] = value


def _refuse_unrelated_runs() -> None:
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and not dist.is_initialized():
        raise ValueError(
            f"WORLD_SIZE is {launched} in the environment, but this process would train alone and "
            "overwrite the others' checkpoints; start it with `torchrun … -m fairseq_tutel.train`."
        )


def refuse_backend(distributed: Any) -> None:
    """Refuse a data-parallel wrapper that would break experts."""
    backend = str(distributed.ddp_backend)
    if backend in ("fully_sharded", "slowmo"):
        raise ValueError(
            f"--ddp-backend is {backend}, which would shard or average experts as if they were "
            "replicas; use legacy_ddp, or pytorch_ddp on a GPU."
        )


def _refuse_options(root: Any, on_gpu: bool) -> None:
    distributed, common = root.distributed_training, root.common
    refuse_backend(distributed)
    backend = str(distributed.ddp_backend)
    several = distributed.distributed_world_size > 1
    bad = [
        (
            several and not on_gpu and backend not in ("legacy_ddp", "no_c10d"),
            f"--ddp-backend is {backend}, which needs a GPU; add --ddp-backend legacy_ddp.",
        ),
        (
            several and root.ema.store_ema,
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
            f"--model-parallel-size is {common.model_parallel_size}, which does not work with "
            "experts; set it to 1.",
        ),
        (
            distributed.pipeline_model_parallel,
            "--pipeline-model-parallel is set, which does not work with experts; drop it.",
        ),
        (
            str(distributed.zero_sharding) != "none",
            f"--zero-sharding is {distributed.zero_sharding}, which would shard experts as if they "
            "were replicas; set it to none and give --moe-zero-stage instead.",
        ),
        (
            read(TaskConfig, root.task).moe_checkpoint == "sharded"
            and PathManager.path_requires_pathmanager(root.checkpoint.save_dir),
            f"--save-dir is {root.checkpoint.save_dir}, which is not a local folder, and --moe-checkpoint "
            "sharded needs one; give a folder, or --moe-checkpoint full.",
        ),
        (
            root.checkpoint.write_checkpoints_asynchronously,
            "--write-checkpoints-asynchronously is set, which writes files in place, so that a kill leaves "
            "a truncated one; drop it.",
        ),
        (
            not (root.optimizer and root.optimizer._name),
            "--optimizer is not given; choose one, such as moe_adam.",
        ),
        (
            several and root.optimization.use_bmuf,
            "--use-bmuf is set, which averages experts as if they were replicas; drop it.",
        ),
    ]
    refuse_first(bad)


def _refuse_with_pregating(model: nn.Module, ahead: int) -> None:
    if any(hasattr(module, "precheckpoint_forward") for module in model.modules()):
        raise ValueError(
            f"--moe-pregate is {ahead}, so gates read the input of an earlier layer, but "
            "--checkpoint-activations recomputes each layer alone; drop one of them "
            "(--moe-recompute-experts saves memory with --moe-pregate)."
        )
    _refuse_layerdrop(
        model,
        f"--moe-pregate {ahead} lets a layer's gate read the input of another, and either may be dropped; "
        "set one of them to 0",
    )


def _refuse_layerdrop(model: nn.Module, reason: str) -> None:
    for side, name, layers in named_stacks(model):
        # LayerDropModuleList has the probability; for wav2vec2 the module that owns the layers has it.
        owner = model.get_submodule(name.rpartition(".")[0])
        value = getattr(layers, "p", getattr(owner, "layerdrop", 0.0))
        if value > 0:
            raise ValueError(f"--{side}-layerdrop is {value}: {reason}.")


def _refuse_with_expert_parallelism(root: Any, sliced: bool) -> None:
    name = root.optimizer._name
    if sliced and getattr(root.optimizer, "fp16_adam_stats", False):
        raise ValueError(
            "--fp16-adam-stats is set, whose scales are of whole experts, and ranks hold shards of them; "
            "drop it, or give --moe-expert-parallel-size a divisor of the experts."
        )
    if name.removeprefix("moe_") in NOT_ELEMENTWISE:
        raise ValueError(
            f"--optimizer is {name}, whose updates depend on all experts of a layer at once, and each rank "
            "holds some of them; use moe_adam, or --moe-expert-parallel-size 1."
        )


def _use_moe_optimizer(root: Any) -> None:
    name = root.optimizer._name
    variant = variant_name(name)
    if variant != name and variant in OPTIMIZER_REGISTRY:
        logger.info("optimizer %s becomes %s, which supports experts", name, variant)
        root.optimizer._name = variant
        if hasattr(root.optimizer, "optimizer"):  # fairseq's older ones have the whole command line
            root.optimizer.optimizer = variant
