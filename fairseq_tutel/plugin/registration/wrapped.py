"""All that is wrapped in fairseq: seven functions, each because no registry or override reaches it.

1. `checkpoint_utils.save_checkpoint`: every rank calls it, and rank 0 alone goes on to save, so before it
   is the one place where experts can be gathered, or written by all. What it calls on every rank itself,
   `Trainer.consolidate_optimizer`, is not told whether anything is saved, and is called before crash.pt,
   too, when the others may be gone.
2. `checkpoint_utils.load_checkpoint_to_cpu`: who loads a state does not know where its file stood, and
   experts in shard files stand beside it; and no one else stands at every door by which a file comes in
   that is to be used, damaged or foreign as it may be. Who builds the model is not told that it is one's.
3. `checkpoint_utils.load_checkpoint`: a dense run calls no other function of the plugin first, and
   fairseq would start from scratch where checkpoint_last.pt is a pipe.
4. `checkpoint_utils.torch_persistent_save`: after a write that failed stock goes on behind what that one
   left in the file, which then gets a checkpoint's name and cannot be opened; and two jobs share its
   temporary name.
5. `PathManager.copy`: stock copies over checkpoint_last and checkpoint_best in place, and a kill in
   the middle leaves a torn file; no copy shares its bytes where the file system could.
6. `distributed.utils.call_main`: under torchrun on CPU stock fairseq divides by the number of GPUs, or
   trains N unrelated models into one folder; fairseq-train takes --bf16 for a wish to run on a TPU, and
   reads ranks and devices by that before it builds anything of ours; where ranks do not find each other,
   or one of fairseq's own collectives fails, no code of ours is nearer that could say who is missing;
   where models are used, ranks that share experts serve each other until all are done, which no one
   function of theirs knows; a training, a dense one too, has its --save-dir to itself until it ends; and a
   task without a dataclass is given no way to the run's configuration.
7. `FP16Optimizer.build_optimizer`: it copies all half parameters to fp32 before it builds an optimizer
   of ours, which may be there to keep a shard of them. (As --memory-efficient-fp16 it would not, but its
   name stands in checkpoints, which runs with and without shards are to read of each other.)

What else changes in a process, and where:

- at import (`plugin.register`): thresholds of glibc's malloc, which classes torch.load takes for safe, and
  sys.excepthook, by which a refusal that ends the process is its sentence alone (`startup.py`);
  twins in fairseq's and hydra's registries (`optim`, `criterions`, `models`, `tasks`); the options of every
  task, of a user's own when it is there (`task_options.py`); --is-moe leaves sys.argv, under --user-dir;
- where a model with experts is built: the run's configuration (`run_config.complete`, each change logged),
  the class of a task that has not our mixin, and then that of its iterator (`task.py`);
- where commands run: `train` and `run` add --user-dir to sys.argv, and `run` takes its command out;
  torchrun's ranks go into the configuration, and a rank's GPU becomes torch's current one (`startup.py`);
  ranks that use a model write their results apart (`parallel_inference.py`); without a GPU fairseq's
  all_gather_list gets buffers on the CPU (`startup.py`); torch's groups get time-outs (`ranks/guard.py`),
  and threads, one of ours and those that read batches, leave before the process does
  (`comm/background.py`, `startup.py`);
- while fairseq-train's main runs: its module's `train`, which checks first what was loaded (`sound.py`);
- where a training diagnoses a NaN: hooks of encoders' backwards go before stock looks for it (`task.py`).

No environment variable is set, and no logger but our own is touched.
"""

import atexit
import functools
import hashlib
import inspect
import logging
import sys
from typing import Any

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.optim.fp16_optimizer import FP16Optimizer

from fairseq_tutel.optim.moe_optimizer import MoEOptimizerMixin
from fairseq_tutel.optim.zero import ZeroFP16Optimizer, zero_options
from fairseq_tutel.plugin.opening.load import load_checkpoint, load_checkpoint_to_cpu
from fairseq_tutel.plugin.opening.several_ranks import run_on_several_ranks
from fairseq_tutel.plugin.training import save
from fairseq_tutel.plugin.training.checks import refuse_backend, run_with_root
from fairseq_tutel.plugin.training.startup import (
    drop_tpu,
    end_readers,
    excepthook,
    join_torchrun,
    meeting_of,
    read_on_every_rank,
    refusals_are_sentences,
)
from fairseq_tutel.ranks import rendezvous
from fairseq_tutel.ranks.guard import guarded, keeps_the_store

logger = logging.getLogger(__name__)


def _guard(function: Any, parameters: tuple[str, ...], digest: str) -> None:
    """Refuse a function of fairseq's that is called otherwise than when the wrapper was written.

    One that only reads otherwise, as in a checkout of one's own, is said.

    Args:
        function: not wrapped yet.
        parameters: their names.
        digest: of its source.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise ImportError(
            f"fairseq's {function.__qualname__} takes {found}, expected {parameters}; install the "
            "fairseq version that fairseq_tutel names in its requirements."
        )
    read = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]
    if read != digest:
        logger.warning(
            "fairseq's %s is not that of fairseq-fixed 0.12.3.1, for which its wrapper was written: look "
            "whether what is said of it in %s still holds",
            function.__qualname__,
            __file__,
        )


def call_main(original: Any) -> Any:
    """Let torchrun's ranks meet, --bf16 mean bf16, an error name who is missing, ranks end together.

    A training begins once --save-dir is its own.
    """

    @functools.wraps(original)
    @refusals_are_sentences()
    def wrapper(cfg: Any, main: Any, **kwargs: Any) -> Any:
        drop_tpu(cfg)
        join_torchrun(cfg)
        if cfg.distributed_training.distributed_init_method is None:
            distributed_utils.infer_init_method(cfg.distributed_training)
        run: Any = run_on_several_ranks
        if cfg.common_eval.path is None:
            run = save.run_as_only_writer
            read_on_every_rank(cfg)
            if hasattr(cfg.model, "moe_freq"):  # before stock looks for fairscale
                refuse_backend(cfg.distributed_training)
        if cfg.distributed_training.distributed_init_method == "env://" and keeps_the_store():
            cfg.distributed_training.distributed_init_method = rendezvous.METHOD
        # Processes that fairseq itself spawns get what can be pickled.
        on_each = functools.partial(run_with_root, functools.partial(run, main))
        with guarded("a collective of fairseq's own", timed=False), meeting_of(cfg) as met:

            def met_main(*args: Any, **kwargs: Any) -> Any:
                met()
                return on_each(*args, **kwargs)

            return original(cfg, met_main if met else on_each, **kwargs)

    return wrapper


def build_optimizer(original: Any) -> Any:
    """Build the wrapper of an optimizer of shards, where the run asks for these; tell others of masters."""

    @functools.wraps(original)
    def wrapper(cls: type, cfg: Any, params: Any, **kwargs: Any) -> Any:
        if zero_options(cfg) is not None:
            return ZeroFP16Optimizer.build_optimizer(cfg, params, **kwargs)
        optimizer = original(cls, cfg, params, **kwargs)
        if isinstance(optimizer.fp32_optimizer, MoEOptimizerMixin):
            optimizer.fp32_optimizer.holds_masters = True
        return optimizer

    return wrapper


# Owner, name and wrapper of each, the parameters it is called with, and the digest of its source.
WRAPPED = (
    (checkpoint_utils, "save_checkpoint", save.save_checkpoint,
     "cfg trainer epoch_itr val_loss", "61513534b9b3"),
    (checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu,
     "path arg_overrides load_on_all_ranks", "96f7d33cde8e"),
    (checkpoint_utils, "load_checkpoint", load_checkpoint,
     "cfg trainer passthrough_args", "08e4fa03a2ab"),
    (checkpoint_utils, "torch_persistent_save", save.persistent_save,
     "obj filename async_write", "5f397c23bc88"),
    (PathManager, "copy", save.copy, "src_path dst_path overwrite", "1d3c09d3f196"),
    (distributed_utils, "call_main", call_main, "cfg main kwargs", "c2a32fa44fa2"),
    (FP16Optimizer, "build_optimizer", build_optimizer, "cfg params kwargs", "c7ff6d890b7d"),
)  # fmt: skip


def install() -> None:
    """Install the wrappers, and what comes at the end; called once, at import."""
    for owner, name, _, parameters, digest in WRAPPED:
        _guard(getattr(owner, name), tuple(parameters.split()), digest)
    for owner, name, wrap, *_ in WRAPPED:
        as_it_stands = inspect.getattr_static(owner, name)
        if isinstance(as_it_stands, staticmethod | classmethod):
            setattr(owner, name, type(as_it_stands)(wrap(as_it_stands.__func__)))
        else:
            setattr(owner, name, wrap(as_it_stands))
    atexit.register(end_readers)
    sys.excepthook = excepthook(sys.excepthook)


install()
