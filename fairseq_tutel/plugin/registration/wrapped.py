"""Wraps five fairseq functions that cannot be changed by a registry, an override or a hook.

1. `checkpoint_utils.save_checkpoint`: all ranks call it, and only rank 0 continues to save. The wrapper
   first gathers the experts, or lets all ranks write them. `Trainer.consolidate_optimizer` cannot do this:
   it also runs if nothing is saved, and before crash.pt is saved, when other ranks may be gone.
2. `checkpoint_utils.load_checkpoint_to_cpu`: fairseq loads every checkpoint with it. Shard files of experts
   are next to the checkpoint file, but the loaded state does not contain the file's path. The wrapper
   refuses damaged and foreign files, and marks models that are opened for use.
3. `checkpoint_utils.torch_persistent_save`: fairseq retries a failed write by appending to the same file,
   which then cannot be opened. Two jobs also write to the same temporary file.
4. `PathManager.copy`: fairseq overwrites checkpoint_last and checkpoint_best in place. A kill during the
   copy leaves a truncated file. The wrapper's copy shares disk blocks where the file system can.
5. `distributed.utils.call_main`: it runs first in every command, so the wrapper can make these changes:
   - Under torchrun on CPU, fairseq divides by the number of GPUs, or trains N models into one folder. On
     GPU, it uses the GPU RANK % count, which is wrong if nodes have different numbers of ranks.
   - fairseq-train treats --bf16 as a request for a TPU.
   - Errors of the rendezvous and of fairseq's collectives name the missing ranks.
   - If a rank fails, the other ranks end; otherwise all ranks end together.
   - Each rank keeps running its experts for the other ranks of its EP group until all have finished.
   - A training run locks its --save-dir, and chooses the checkpoint from which it resumes.
   - A signal makes training save a checkpoint before it ends.
   - Tasks without a dataclass get access to the run's configuration.
The package also changes the process in these ways, in addition to the attributes in `CHANGED`:

- at import: names that newer numpy lacks (`NUMPY_NAMES`); thresholds of malloc, and the classes that
  torch.load accepts (`plugin.register`);
  sys.excepthook (`process.py`); MoE variants in fairseq's and hydra's registries (`optim`, `criterions`,
  `models`, `tasks`); options of every task (`variants.py`); --is-moe is removed from sys.argv (`flags.py`);
- when a command runs: `train` and `run` change sys.argv; fairseq's main function uses a subclass of its
  Trainer (`training/own_layers.py`); the configuration gets torchrun's ranks, and
  torch gets a current GPU (`training/startup.py`) and time-outs (`parallel/guard.py`); each rank gets a
  folder for results (`opening/several_ranks.py`); threads end before the process
  (`parallel/background.py`, `process.py`);
- when a model with experts is built: the run's configuration (`startup.complete` logs each change);
- at a signal: handlers of Python (`parallel/signals.py`), while a training run lasts.

No environment variable is set. Only the plugin's loggers are configured.
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


def call_main(original: Any) -> Any:
    """Wrap fairseq's `call_main`, which starts every command; see item 5 of the module's docstring."""

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
        # A partial can be pickled for processes that fairseq spawns.
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
    import_user_module(cfg.common)  # hydra does not import the user's module, which may register tasks
    # A spawned rank has already imported the package, so fairseq skips it as a --user-dir.
    plugin.register()
    give_system_options()
    _check_model(cfg)
    with RUN.having(cfg=cfg):
        return main(cfg, **kwargs)


def _check_model(cfg: Any) -> None:
    """Raise an error for stock options that break experts."""
    if cfg.common_eval.path is not None:
        return
    name = getattr(cfg.model, "ensemble_arch", None) or getattr(cfg.model, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(name, MODEL_REGISTRY.get(name))
    if not getattr(model, "has_experts", model is None):
        return  # a user's model may have experts, which `own_layers.prepare` finds
    startup.refuse_stock_options(cfg)


# Each wrapped function: its owner, its name and the wrapper.
WRAPPED = (
    (checkpoint_utils, "save_checkpoint", save.save_checkpoint),
    (checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu),
    (checkpoint_utils, "torch_persistent_save", save.persistent_save),
    (PathManager, "copy", save.copy),
    (distributed_utils, "call_main", call_main),
)

# Names of numpy that fairseq uses and that numpy 1.24 and 2.0 removed; they were Python's types.
NUMPY_NAMES = {"int": int, "long": int, "float": float, "compat": SimpleNamespace(long=int)}

# For each file, the attributes that it sets on objects that fairseq or torch constructs or reads.
# Configurations, and data and gradients of tensors, are not listed.
CHANGED = {
    # fairseq constructs tasks, iterators, data sets, and models whose build_model has a fixed class.
    "plugin/registration/variants.py": "__class__ __dataclass add_args",
    "plugin/registration/process.py": "_max_len",  # ends a thread that reads batches
    "plugin/registration/wrapped.py": "excepthook",  # prints error sentences
    "plugin/feed_forward.py": "fc1 fc2 activation_fn ffn_layernorm",  # a layer's forward calls them
    # fairseq's tasks read the languages, and one reads args, which it does not set; bpe may be None.
    "plugin/hub_interfaces.py": "args source_langs target_langs bpe",
    "plugin/training/own_layers.py": "_ddp_params_and_buffers_to_ignore max_epoch",  # of DDP; ends a run
    # A copy of a trainer, with the attributes that fairseq's save_checkpoint reads in a thread.
    "plugin/training/background_save.py": "get_checkpoint_dict no_save save_checkpoint",
    "plugin/opening/load.py": "load",  # torch.load, which maps a file while fairseq opens it
    # A signal ends a validation. No hook exists for the sums over ranks. `training/loop.py` also replaces
    # functions of fairseq's training loop, because no hooks exist before an epoch and after an update.
    "plugin/training/preemption.py": "valid_step _aggregate_logging_outputs",
    "plugin/training/startup.py": "_buffer _cpu_buffer",  # fairseq's all_gather_list puts them on a GPU
    "plugin/criterions/teacher.py": "is_of_teacher",  # set on the copy of a task that builds a teacher
    # fairseq would replace the loaded state; the Trainer compares the name with the name in a checkpoint.
    "plugin/optim/zero.py": "disable_mem_eff_fp16_loading_hack __name__ holds_masters",
    "parallel/groups.py": "param_group",  # the only attribute that fairseq copies to fp32 masters
    "parallel/gradients.py": "expert _tutel_expert root_scaled",  # marks of experts' parameters
    "parallel/call_id.py": "_torchdynamo_disable count",  # disables tracing; counts a layer's calls
    "parallel/rendezvous.py": "daemon",  # a timer must not keep the process alive
    "parallel/zero_state.py": "zero_hook",  # fairseq may build another optimizer, with its own hook
}


def install() -> None:
    """Wrap the fairseq functions of `WRAPPED` and install the exit handlers; called once, at import."""
    for owner, name, wrap in WRAPPED:
        static = inspect.getattr_static(owner, name)
        if isinstance(static, staticmethod | classmethod):
            setattr(owner, name, type(static)(wrap(static.__func__)))
        else:
            setattr(owner, name, wrap(static))
    for name, value in NUMPY_NAMES.items():
        if name not in vars(numpy):  # hasattr would print a warning
            setattr(numpy, name, value)
    atexit.register(end_readers)
    sys.excepthook = excepthook(sys.excepthook)


install()
