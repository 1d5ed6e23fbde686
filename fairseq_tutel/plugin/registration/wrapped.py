"""Wraps five fairseq functions that cannot be changed by a registry, an override or a hook.

- `checkpoint_utils.save_checkpoint`: The wrapper gathers the experts, or lets all ranks write shard files,
  before rank 0 saves a checkpoint. An override of `Trainer.consolidate_optimizer` would not do: fairseq
  also calls it if nothing is saved, and for crash.pt, when other ranks may have ended.
- `checkpoint_utils.load_checkpoint_to_cpu`: fairseq loads every checkpoint with this function. The wrapper
  finds shard files by the checkpoint's path. The loaded state does not contain this path. The wrapper also
  refuses damaged and foreign files, and marks models that are opened for inference.
- `checkpoint_utils.torch_persistent_save`: fairseq retries a failed write by appending to the damaged file.
  Without the wrapper, two jobs would also write to the same temporary file.
- `PathManager.copy`: fairseq overwrites checkpoint_last and checkpoint_best in place. If fairseq is killed
  during the copy, the checkpoint is truncated. The wrapper copies to a temporary file, and renames it.
- `distributed.utils.call_main`: Every fairseq command begins with a call of call_main.
  - Stock fairseq under torchrun on CPU raises ZeroDivisionError, or each rank trains a separate model.
  - In stock fairseq, a rank uses GPU RANK % num_gpus, which is wrong if nodes have unequal rank counts.
  - Stock fairseq-train treats --bf16 as a request for a TPU.
  - With the wrapper, errors of the rendezvous and of fairseq's collectives name the missing ranks.
  - If a rank fails, the wrapper ends all other ranks.
  - In inference, the wrapper lets each rank run its experts until all ranks have finished.
  - The wrapper locks a training run's --save-dir, and chooses the checkpoint from which the run resumes.
  - With the wrapper, a signal makes training save a checkpoint before the run ends.
  - With the wrapper, tasks without a dataclass can read the run's configuration.
"""

import atexit
import functools
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import numpy
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.utils import import_user_module

from fairseq_tutel import plugin
from fairseq_tutel.parallel import rendezvous, world
from fairseq_tutel.parallel.failures import keeps_the_store
from fairseq_tutel.plugin.opening.load import load_checkpoint_to_cpu
from fairseq_tutel.plugin.opening.several_ranks import run_on_several_ranks
from fairseq_tutel.plugin.registration.process import (
    end_readers,
    excepthook,
    refusals_are_sentences,
    run_as_spawned,
)
from fairseq_tutel.plugin.registration.variants import give_system_options
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training import preemption, save, startup
from fairseq_tutel.plugin.training.own_layers import MoETrainer


def call_main(original: Any) -> Any:
    """Wrap fairseq's `call_main`, which starts every command; this file's docstring gives the reasons."""

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
            # torch >= 2.6 rejects the pickles of fairseq's broadcast, so every rank reads the checkpoint.
            cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
        if distributed.distributed_init_method == "env://" and keeps_the_store():
            distributed.distributed_init_method = rendezvous.METHOD
        # Only a partial can be pickled for the ranks that fairseq spawns; a nested function cannot.
        on_each = functools.partial(run_with_root, functools.partial(run, main))
        spawns = distributed.distributed_init_method is not None and not distributed.distributed_no_spawn
        if spawns:
            watched = functools.partial(preemption.run_watched, on_each, main)
            on_each = functools.partial(run_as_spawned, watched)
        with preemption.watching(cfg, main, spawns) as signals, startup.meeting_of(cfg) as met:
            if signals is not None and not spawns:
                on_each = functools.partial(on_each, signals=signals)

            def met_main(*args: Any, **kwargs: Any) -> Any:
                met()
                return on_each(*args, **kwargs)

            return original(cfg, met_main if met else on_each, **kwargs)

    return wrapper


@world.ending_together("a collective of fairseq's own")
def run_with_root(main: Any, cfg: Any, **kwargs: Any) -> Any:
    """Run the main function of a command, with its FairseqConfig in `RUN.cfg`."""
    startup.note_spawned_ranks(cfg)
    import_user_module(cfg.common)  # A user's module may register tasks; fairseq-hydra-train skips this.
    # In a spawned rank, fairseq does not import --user-dir again, so the plugin is registered here.
    plugin.register()
    give_system_options()
    _check_model(cfg)
    with RUN.having(cfg=cfg):
        return main(cfg, **kwargs)


def _check_model(cfg: Any) -> None:
    """Raise an error for fairseq options that do not work with experts."""
    if cfg.common_eval.path is not None:
        return
    name = getattr(cfg.model, "ensemble_arch", None) or getattr(cfg.model, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name))
    if not getattr(model, "has_experts", model is None):
        return  # own_layers checks a user's own model later.
    startup.refuse_stock_options(cfg)


# The owner, the name and the wrapper of each wrapped fairseq function.
WRAPPED = (
    (checkpoint_utils, "save_checkpoint", save.save_checkpoint),
    (checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu),
    (checkpoint_utils, "torch_persistent_save", save.persistent_save),
    (PathManager, "copy", save.copy),
    (distributed_utils, "call_main", call_main),
)

# fairseq uses these numpy names for Python types, but numpy 1.24 and 2.0 removed the names.
NUMPY_NAMES = {"int": int, "long": int, "float": float, "compat": SimpleNamespace(long=int)}


def install() -> None:
    """Wrap the fairseq functions of `WRAPPED` and install the exit handlers; called once, at import."""
    for owner, name, wrap in WRAPPED:
        static = inspect.getattr_static(owner, name)
        if isinstance(static, staticmethod | classmethod):
            setattr(owner, name, type(static)(wrap(static.__func__)))
        else:
            setattr(owner, name, wrap(static))
    for name, value in NUMPY_NAMES.items():
        if name not in vars(numpy):  # hasattr would print a warning.
            setattr(numpy, name, value)
    # fairseq-hydra-train imports the plugin too late for `call_main`, but before it looks up the Trainer.
    if (training := sys.modules.get("fairseq_cli.train")) is not None:
        vars(training)["Trainer"] = MoETrainer
    atexit.register(end_readers)
    sys.excepthook = excepthook(sys.excepthook)


install()
