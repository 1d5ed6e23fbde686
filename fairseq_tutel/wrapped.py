"""All that is wrapped in fairseq: six functions, each because no registry or override reaches it.

1. `Trainer.consolidate_optimizer`: every rank calls it before rank 0 alone saves, also with
   --no-save-optimizer-state, so it is the one place where experts can be gathered, or written by all.
2. `checkpoint_utils.load_checkpoint_to_cpu`: who loads a state does not know where its file stood, and
   experts in shard files stand beside it.
3. `PathManager.copy`: stock copies over checkpoint_last and checkpoint_best in place, and a kill in
   the middle leaves a torn file.
4. `distributed.utils.call_main`: under torchrun on CPU stock fairseq divides by the number of GPUs, or
   trains N unrelated models into one folder; fairseq-train takes --bf16 for a wish to run on a TPU, and
   reads ranks and devices by that before it builds anything of ours; where ranks do not find each other,
   or one of fairseq's own collectives fails, no code of ours is nearer that could say who is missing; and
   where models are used, ranks that share experts serve each other until all are done, which no one
   function of theirs knows.
5. `FP16Optimizer.build_optimizer`: it copies all half parameters to fp32 before it builds an optimizer
   of ours, which may be there to keep a shard of them.
6. `checkpoint_utils._torch_persistent_save`: after a write that failed stock goes on behind what that one
   left in the file, which then gets a checkpoint's name and cannot be opened.
"""

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.trainer import Trainer
from omegaconf import OmegaConf, open_dict

from fairseq_tutel.comm import checkpoint, guard, restart, topology
from fairseq_tutel.comm.guard import guarded
from fairseq_tutel.comm.meeting import meeting
from fairseq_tutel.expert_stack import ExpertStack
from fairseq_tutel.optim.moe_optimizer import MoEOptimizerMixin, innermost_optimizer
from fairseq_tutel.optim.shard_plan import plan_of
from fairseq_tutel.optim.sharded_fp16 import ShardedFP16Optimizer
from fairseq_tutel.run_config import saves_shards
from fairseq_tutel.shards import bind
from fairseq_tutel.together import OnSeveralRanks
from fairseq_tutel.whole_files import TEMPORARY, save, unwritten

logger = logging.getLogger(__name__)


def _guard(function: Any, parameters: tuple[str, ...]) -> None:
    """Refuse a fairseq whose function no longer looks as it did when the wrapper was written."""
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise ImportError(
            f"fairseq's {function.__qualname__} takes {found}, expected {parameters}; install the "
            "fairseq version that fairseq_tutel names in its requirements."
        )


def consolidate_optimizer(original: Any) -> Any:
    """Gather experts and their optimizer state to rank 0, or write them, then do what stock does."""

    @functools.wraps(original)
    def wrapper(self: Trainer) -> None:
        inner = innermost_optimizer(self.optimizer)
        if isinstance(inner, MoEOptimizerMixin):
            inner.holds_masters = isinstance(self.optimizer, FP16Optimizer)
        place, model = topology.in_use(), self.get_model()
        with_state = not self.cfg.checkpoint.no_save_optimizer_state
        shared = place.expert_parallel_size > 1 and checkpoint.expert_modules(model)
        shared = shared or getattr(inner, "is_apart", False)
        # train_step itself calls this only before it writes crash.pt: the others may be gone.
        if sys._getframe(1).f_code.co_name == "train_step":
            if shared:
                logger.warning(
                    "crash.pt will hold this rank's experts or shards only, and can not be resumed from"
                )
        elif saves_shards(self.task) and checkpoint.expert_modules(model):
            # A composite optimizer, which one rank alone may have, keeps its states in the file.
            by_parameter = with_state and hasattr(inner.optimizer, "state")
            _save_in_shards(self, inner if by_parameter else None, place)
        elif shared:
            checkpoint.gather_experts(model, place)
            if with_state:
                inner.gather_state(place)
        original(self)

    return wrapper


def _save_in_shards(trainer: Trainer, inner: MoEOptimizerMixin | None, place: Any) -> None:
    """Let every rank write its experts, with their state in `inner`; what follows saves where."""
    model, save_dir = trainer.get_model(), Path(trainer.cfg.checkpoint.save_dir)
    # The optimizer knows parameters by their place in this list, and where they are half, masters of them.
    trained = getattr(trainer.optimizer, "fp16_params", None) or (
        inner.model_params() if inner else []
    )
    index_of = {id(parameter): index for index, parameter in enumerate(trained)}

    def states(parameter: Any) -> Any:
        index = index_of.get(id(parameter))
        return {} if inner is None or index is None else inner.expert_state(index)

    records = checkpoint.save_in_shards(model, place, states, save_dir)
    if inner is None:
        return
    if place.rank > 0:
        return inner.save_state(None)
    by_index: dict[int, dict[str, Any]] = {}
    for layer, experts in model.named_modules():
        if isinstance(experts, ExpertStack):
            for name, parameter in experts.expert_parameters().items():
                if id(parameter) in index_of:
                    by_index[index_of[id(parameter)]] = {
                        tensor.removeprefix(f"{name}."): record
                        for (of_layer, tensor), record in records.items()
                        if of_layer == layer and tensor.startswith(f"{name}.")
                    }
    inner.save_state(by_index)


def load_checkpoint_to_cpu(original: Any) -> Any:
    """Make what stands for experts in shard files readable: each rank will read its own part."""

    @functools.wraps(original)
    def wrapper(path: str, arg_overrides: Any = None, load_on_all_ranks: bool = False) -> Any:
        state = original(path, arg_overrides, load_on_all_ranks)
        bind(state, Path(path))
        return state

    return wrapper


def _join_torchrun(cfg: Any) -> None:
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
        distributed.device_id = 0 if on_cpu else int(os.environ.get("LOCAL_RANK", 0))
        distributed.distributed_num_procs = 1
        if on_cpu:
            distributed.distributed_backend = "gloo"
            distributed.ddp_backend = "legacy_ddp"
    if not on_cpu:
        torch.cuda.set_device(distributed.device_id)


def _torchrun_world_size() -> int:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def copy(original: Any) -> Any:
    """Copy under a temporary name, then rename: the destination is complete or what it was before."""

    @functools.wraps(original)
    def wrapper(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite)
        temporary = dst_path + TEMPORARY
        try:
            copied = original(src_path, temporary, True)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, dst_path)
        except BaseException as error:
            explained = unwritten(dst_path, error) if isinstance(error, OSError) else error
            if os.path.exists(temporary):
                os.remove(temporary)
            raise explained from error
        return dst_path if isinstance(copied, str) else copied

    return wrapper


def persistent_save(original: Any) -> Any:
    """Write local files so that a second try begins at the first byte."""

    @functools.wraps(original)
    def wrapper(obj: Any, f: Any) -> None:
        path = getattr(f, "name", None)
        if isinstance(path, str) and os.path.isfile(path):
            save(obj, path)
        else:
            original(obj, f)

    return wrapper


def call_main(original: Any) -> Any:
    """Let torchrun's ranks meet, --bf16 mean bf16, an error name who is missing, ranks end together."""

    @functools.wraps(original)
    def wrapper(cfg: Any, main: Any, **kwargs: Any) -> Any:
        if cfg.common.tpu and cfg.common.bf16 and _no_tpu():
            for section in cfg.values():
                if OmegaConf.is_dict(section) and "tpu" in section:
                    section.tpu = False
        _join_torchrun(cfg)
        if cfg.distributed_training.distributed_init_method is None:
            distributed_utils.infer_init_method(cfg.distributed_training)
        on_each = main if cfg.common_eval.path is None else OnSeveralRanks(main)
        if cfg.distributed_training.distributed_init_method == "env://" and restart.may_happen():
            cfg.distributed_training.distributed_init_method = restart.METHOD
        with guarded("a collective of fairseq's own", timed=False), _meeting(cfg) as met:

            def met_main(*args: Any, **kwargs: Any) -> Any:
                met()
                return on_each(*args, **kwargs)

            # Processes that fairseq itself spawns get `main` by its name.
            return original(cfg, met_main if met else on_each, **kwargs)

    return wrapper


def _meeting(cfg: Any) -> contextlib.AbstractContextManager[Any]:
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


def _no_tpu() -> bool:
    return torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is None


def build_optimizer(original: Any) -> Any:
    """Build the wrapper of an optimizer of shards, where the run asks for these."""

    @functools.wraps(original)
    def wrapper(cls: type, cfg: Any, params: Any, **kwargs: Any) -> Any:
        if plan_of(cfg) is not None:
            return ShardedFP16Optimizer.build_optimizer(cfg, params, **kwargs)
        return original(cls, cfg, params, **kwargs)

    return wrapper


def install() -> None:
    """Install the wrappers; called once, at import."""
    _guard(Trainer.consolidate_optimizer, ("self",))
    _guard(checkpoint_utils.load_checkpoint_to_cpu, ("path", "arg_overrides", "load_on_all_ranks"))
    _guard(PathManager.copy, ("src_path", "dst_path", "overwrite"))
    _guard(distributed_utils.call_main, ("cfg", "main", "kwargs"))
    _guard(FP16Optimizer.build_optimizer, ("cfg", "params", "kwargs"))
    _guard(checkpoint_utils._torch_persistent_save, ("obj", "f"))
    Trainer.consolidate_optimizer = consolidate_optimizer(Trainer.consolidate_optimizer)
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu(
        checkpoint_utils.load_checkpoint_to_cpu
    )
    PathManager.copy = staticmethod(copy(PathManager.copy))
    distributed_utils.call_main = call_main(distributed_utils.call_main)
    stock = FP16Optimizer.build_optimizer.__func__
    FP16Optimizer.build_optimizer = classmethod(build_optimizer(stock))
    checkpoint_utils._torch_persistent_save = persistent_save(
        checkpoint_utils._torch_persistent_save
    )


install()
