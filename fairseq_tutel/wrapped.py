"""All that is wrapped in fairseq: four functions, each because no registry or override reaches it.

1. `Trainer.consolidate_optimizer`: every rank calls it before rank 0 alone saves, also with
   --no-save-optimizer-state, so it is the one place where experts can be gathered.
2. `distributed.utils.infer_init_method`: under torchrun on CPU stock fairseq divides by the number
   of GPUs, or trains N unrelated models into one folder.
3. `PathManager.copy`: stock copies over checkpoint_last and checkpoint_best in place, and a kill in
   the middle leaves a torn file.
4. `distributed.utils.call_main`: fairseq-train takes --bf16 for a wish to run on a TPU, and reads ranks
   and devices by that before it builds anything of ours; and where one of fairseq's own collectives
   fails, no code of ours is nearer that could say who is missing.
"""

import functools
import importlib.util
import inspect
import logging
import os
import sys
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.trainer import Trainer
from omegaconf import OmegaConf, open_dict

from fairseq_tutel.comm import checkpoint, topology
from fairseq_tutel.comm.guard import guarded
from fairseq_tutel.optim.moe_optimizer import MoEOptimizerMixin, innermost_optimizer

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
    """Gather experts and their optimizer state to rank 0, then do what stock does."""

    @functools.wraps(original)
    def wrapper(self: Trainer) -> None:
        inner = innermost_optimizer(self.optimizer)
        if isinstance(inner, MoEOptimizerMixin):
            inner.holds_masters = isinstance(self.optimizer, FP16Optimizer)
        place = topology.in_use()
        shared = place.expert_parallel_size > 1 and checkpoint.expert_modules(self.get_model())
        # train_step itself calls this only before it writes crash.pt: the others may be gone.
        if shared and sys._getframe(1).f_code.co_name == "train_step":
            logger.warning(
                "crash.pt will hold this rank's experts only, and can not be resumed from"
            )
        elif shared:
            checkpoint.gather_experts(self.get_model(), place)
            if not self.cfg.checkpoint.no_save_optimizer_state:
                inner.gather_state(place)
        original(self)

    return wrapper


def infer_init_method(original: Any) -> Any:
    """Read rank and world size from torchrun's environment where stock cannot."""

    @functools.wraps(original)
    def wrapper(cfg: Any, force_distributed: bool = False) -> None:
        world = _torchrun_world_size()
        root = cfg._get_root() if hasattr(cfg, "_get_root") else None
        on_cpu = not torch.cuda.is_available() or bool(root and root.common.cpu)
        stock_works = not on_cpu and cfg.distributed_world_size > 1
        if cfg.distributed_init_method is not None or world <= 1 or stock_works:
            return original(cfg, force_distributed)
        with open_dict(cfg):
            cfg.distributed_init_method = "env://"
            cfg.distributed_world_size = world
            cfg.distributed_rank = int(os.environ["RANK"])
            cfg.distributed_no_spawn = True
            cfg.device_id = 0 if on_cpu else int(os.environ.get("LOCAL_RANK", 0))
            cfg.distributed_num_procs = 1
            if on_cpu:
                cfg.distributed_backend = "gloo"
                cfg.ddp_backend = "legacy_ddp"
        if not on_cpu:
            torch.cuda.set_device(cfg.device_id)

    return wrapper


def _torchrun_world_size() -> int:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def copy(original: Any) -> Any:
    """Copy under a temporary name, then rename: the destination is complete or what it was before."""

    @functools.wraps(original)
    def wrapper(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite)
        temporary = dst_path + ".tmp"
        try:
            copied = original(src_path, temporary, True)
            os.replace(temporary, dst_path)
        except BaseException:
            if os.path.exists(temporary):
                os.remove(temporary)
            raise
        return dst_path if isinstance(copied, str) else copied

    return wrapper


def call_main(original: Any) -> Any:
    """Let --bf16 mean bf16 on the devices there are, and a failed collective name the missing rank."""

    @functools.wraps(original)
    def wrapper(cfg: Any, main: Any, **kwargs: Any) -> Any:
        if cfg.common.tpu and cfg.common.bf16 and _no_tpu():
            for section in cfg.values():
                if OmegaConf.is_dict(section) and "tpu" in section:
                    section.tpu = False
        with guarded("a collective of fairseq's own", timed=False):
            return original(cfg, main, **kwargs)

    return wrapper


def _no_tpu() -> bool:
    return torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is None


def install() -> None:
    """Install the wrappers; called once, at import."""
    _guard(Trainer.consolidate_optimizer, ("self",))
    _guard(distributed_utils.infer_init_method, ("cfg", "force_distributed"))
    _guard(PathManager.copy, ("src_path", "dst_path", "overwrite"))
    _guard(distributed_utils.call_main, ("cfg", "main", "kwargs"))
    Trainer.consolidate_optimizer = consolidate_optimizer(Trainer.consolidate_optimizer)
    distributed_utils.infer_init_method = infer_init_method(distributed_utils.infer_init_method)
    PathManager.copy = staticmethod(copy(PathManager.copy))
    distributed_utils.call_main = call_main(distributed_utils.call_main)


install()
