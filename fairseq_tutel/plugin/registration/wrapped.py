"""The six fairseq functions that are wrapped, because no registry, override or hook reaches them.

1. `checkpoint_utils.save_checkpoint`: all ranks call it, and only rank 0 continues to save. Before it,
   experts are gathered, or written by all ranks. `Trainer.consolidate_optimizer`, which it calls on every
   rank, does not know whether anything is saved, and also runs before crash.pt, when ranks may be gone.
2. `checkpoint_utils.load_checkpoint_to_cpu`: every checkpoint that is used passes here. Experts in shard
   files lie next to the file, whose path the loaded state does not contain. Damaged and foreign files are
   refused, and models that are opened for use are marked.
3. `checkpoint_utils.torch_persistent_save`: fairseq retries a failed write by appending to the same file,
   which then cannot be opened. Two jobs share its temporary name.
4. `PathManager.copy`: fairseq copies over checkpoint_last and checkpoint_best in place. A kill during the
   copy leaves a truncated file. The copy here shares disk blocks where the file system can.
5. `distributed.utils.call_main`: nothing of the plugin runs earlier. Under torchrun on CPU fairseq divides
   by the number of GPUs, or trains N unrelated models into one folder. fairseq-train treats --bf16 as a
   request for a TPU. Errors of the rendezvous and of fairseq's collectives get the names of missing ranks.
   Ranks that share experts keep serving each other until all have finished. Training locks its
   --save-dir and chooses its checkpoint. Tasks without a dataclass get access to the run's configuration.
6. `FP16Optimizer.build_optimizer`: it copies all half parameters to fp32 before it builds the inner
   optimizer, which may keep only a shard of them. --memory-efficient-fp16 does not, but its name in
   checkpoints differs, and runs with and without shards read each other's checkpoints.

Other changes to the process, besides attributes (`CHANGED` below):

- at import: thresholds of malloc, and the classes that torch.load accepts (`plugin.register`);
  sys.excepthook (`process.py`); MoE variants in fairseq's and hydra's registries (`optim`, `criterions`,
  `models`, `tasks`); options of every task (`variants.py`); --is-moe is removed from sys.argv (`flags.py`);
- when a command runs: `train` and `run` change sys.argv; the configuration gets torchrun's ranks, and
  torch a current GPU (`training/startup.py`) and time-outs (`ranks/guard.py`); each rank gets a folder for
  results (`opening/several_ranks.py`); threads end before the process (`comm/background.py`, `process.py`);
- when a model with experts is built: the run's configuration (`startup.complete` logs each change);
- when a NaN is diagnosed: backward hooks of encoders are removed (`training/task.py`).

No environment variable is set, and only the plugin's loggers are configured.
"""

import atexit
import functools
import hashlib
import inspect
import logging
import math
import sys
from typing import Any

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.utils import import_user_module

from fairseq_tutel import plugin
from fairseq_tutel.optim.moe_optimizer import MoEOptimizerMixin
from fairseq_tutel.optim.zero import ZeroFP16Optimizer, zero_options
from fairseq_tutel.options.option import flag_of
from fairseq_tutel.plugin.opening.literals import options_within
from fairseq_tutel.plugin.opening.load import load_checkpoint_to_cpu
from fairseq_tutel.plugin.opening.several_ranks import run_on_several_ranks
from fairseq_tutel.plugin.registration.flags import drop_suggestions, warn_of_given
from fairseq_tutel.plugin.registration.process import end_readers, excepthook, refusals_are_sentences
from fairseq_tutel.plugin.registration.variants import give_system_options
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training import save, startup
from fairseq_tutel.ranks import rendezvous, world
from fairseq_tutel.ranks.guard import guarded, keeps_the_store

logger = logging.getLogger(__name__)


def _check_source(function: Any, digest: str) -> None:
    """Warn if the source of a fairseq function is not the one for which its wrapper was written."""
    if hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12] != digest:
        logger.warning(
            "fairseq's %s is not that of fairseq-fixed 0.12.3.1, for which its wrapper was written: check "
            "whether the reasons in %s still hold",
            function.__qualname__,
            __file__,
        )


def call_main(original: Any) -> Any:
    """Wrap fairseq's `call_main`; see item 5."""

    @functools.wraps(original)
    @refusals_are_sentences()
    def wrapper(cfg: Any, main: Any, **kwargs: Any) -> Any:
        distributed = cfg.distributed_training
        startup.drop_tpu(cfg)
        startup.join_torchrun(cfg)
        if distributed.distributed_init_method is None:
            distributed_utils.infer_init_method(distributed)
        run: Any = run_on_several_ranks
        if cfg.common_eval.path is None:
            run = save.run_training
            # torch >= 2.6 refuses the unpickler of fairseq's broadcast, so every rank reads the checkpoint.
            cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        if distributed.distributed_init_method == "env://" and keeps_the_store():
            distributed.distributed_init_method = rendezvous.METHOD
        # A partial can be pickled for processes that fairseq spawns.
        on_each = functools.partial(run_with_root, functools.partial(run, main))
        with guarded("a collective of fairseq's own", timed=False), startup.meeting_of(cfg) as met:

            def met_main(*args: Any, **kwargs: Any) -> Any:
                met()
                return on_each(*args, **kwargs)

            return original(cfg, met_main if met else on_each, **kwargs)

    return wrapper


def run_with_root(main: Any, cfg: Any, **kwargs: Any) -> Any:
    """Run a command's main function while `RUN` has its FairseqConfig."""
    import_user_module(cfg.common)  # hydra does not; it may register tasks
    # A spawned rank has imported this file, so fairseq skips a --user-dir that is the package.
    plugin.register()
    drop_suggestions()
    give_system_options()
    _refuse_nan(cfg)
    _check_model(cfg)
    with RUN.having(cfg=cfg):
        return main(cfg, **kwargs)


def _refuse_nan(cfg: Any) -> None:
    """Refuse NaN as the value of any option: fairseq's comparisons with it are false without an error."""
    for key, value in options_within(cfg):
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise ValueError(f"{flag_of(key)} is nan; give a number, or leave it out.")


def _check_model(cfg: Any) -> None:
    """Refuse data-parallel wrappers that break a training run's experts; warn of options without effect."""
    if cfg.common_eval.path is not None:
        return
    name = getattr(cfg.model, "ensemble_arch", None) or getattr(cfg.model, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name))
    backend = str(cfg.distributed_training.ddp_backend)
    if not getattr(model, "has_experts", model is None):
        if world.is_first():
            warn_of_given(cfg.task, f"--arch {name}")
    elif backend in ("fully_sharded", "slowmo"):
        raise ValueError(
            f"--ddp-backend is {backend}, which would shard or average experts as if they were "
            "replicas; use legacy_ddp, or pytorch_ddp on a GPU."
        )


def build_optimizer(original: Any) -> Any:
    """Wrap FP16Optimizer.build_optimizer: return ZeroFP16Optimizer if shards are requested."""

    @functools.wraps(original)
    def wrapper(cls: type, cfg: Any, params: Any, **kwargs: Any) -> Any:
        if zero_options(cfg) is not None:
            return ZeroFP16Optimizer.build_optimizer(cfg, params, **kwargs)
        optimizer = original(cls, cfg, params, **kwargs)
        if isinstance(optimizer.fp32_optimizer, MoEOptimizerMixin):
            optimizer.fp32_optimizer.save_masters()
        return optimizer

    return wrapper


# Owner, name and wrapper of each function, and the digest of its source.
WRAPPED = (
    (checkpoint_utils, "save_checkpoint", save.save_checkpoint, "61513534b9b3"),
    (checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu, "96f7d33cde8e"),
    (checkpoint_utils, "torch_persistent_save", save.persistent_save, "5f397c23bc88"),
    (PathManager, "copy", save.copy, "1d3c09d3f196"),
    (distributed_utils, "call_main", call_main, "c2a32fa44fa2"),
    (FP16Optimizer, "build_optimizer", build_optimizer, "c7ff6d890b7d"),
)

# By file, attributes of other objects that are set, because fairseq or torch constructs or reads them.
# Configurations, and data and gradients of tensors, are not listed.
CHANGED = {
    # fairseq constructs tasks, their iterators, models whose build_model names a class, and data sets.
    "plugin/registration/variants.py": "__class__ __dataclass add_args",
    "plugin/registration/process.py": "_max_len",  # ends a thread that reads batches
    "plugin/registration/wrapped.py": "excepthook",  # prints error sentences
    # A stock layer's forward calls these; the repr of a lightconv layer reads its dropout's p.
    "plugin/feed_forward.py": "fc1 fc2 activation_fn ffn_layernorm p",
    "plugin/install.py": "_ddp_params_and_buffers_to_ignore",  # DistributedDataParallel reads it
    "plugin/training/finite.py": "train",  # fairseq's training loop has no hook before its first epoch
    "plugin/training/startup.py": "_buffer _cpu_buffer",  # fairseq's all_gather_list needs a GPU for them
    "plugin/training/task.py": "_cur_epoch_itr dataloader",  # releases the workers of an iterator
    # fairseq would replace the loaded state; the Trainer compares the name with a checkpoint's.
    "optim/zero.py": "disable_mem_eff_fp16_loading_hack __name__",
    "ranks/groups.py": "param_group",  # the only attribute that fairseq copies to fp32 masters
    "ranks/guard.py": "daemon",  # a timer must not keep the process
    "zero/state.py": "zero_hook",  # fairseq rebuilds its optimizer; the latest one's hook replaces it
}


def install() -> None:
    """Install the wrappers and the exit handlers; called once, at import."""
    for owner, name, wrap, digest in WRAPPED:
        _check_source(getattr(owner, name), digest)
        static = inspect.getattr_static(owner, name)
        if isinstance(static, staticmethod | classmethod):
            setattr(owner, name, type(static)(wrap(static.__func__)))
        else:
            setattr(owner, name, wrap(static))
    atexit.register(end_readers)
    sys.excepthook = excepthook(sys.excepthook)


install()
