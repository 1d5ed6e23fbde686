"""All that is wrapped in fairseq: six functions, each because no registry or override reaches it.

1. `checkpoint_utils.save_checkpoint`: every rank calls it, and rank 0 alone goes on to save, so before it
   is the one place where experts can be gathered, or written by all. What it calls on every rank itself,
   `Trainer.consolidate_optimizer`, is not told whether anything is saved, and is called before crash.pt,
   too, when the others may be gone.
2. `checkpoint_utils.load_checkpoint_to_cpu`: who loads a state does not know where its file stood, and
   experts in shard files stand beside it; and no one else stands at every door by which a file comes in
   that is to be used, damaged or foreign as it may be. Who builds the model is not told that it is one's.
3. `checkpoint_utils.torch_persistent_save`: after a write that failed stock goes on behind what that one
   left in the file, which then gets a checkpoint's name and cannot be opened; and two jobs share its
   temporary name.
4. `PathManager.copy`: stock copies over checkpoint_last and checkpoint_best in place, and a kill in
   the middle leaves a torn file; no copy shares its bytes where the file system could.
5. `distributed.utils.call_main`: under torchrun on CPU stock fairseq divides by the number of GPUs, or
   trains N unrelated models into one folder; fairseq-train takes --bf16 for a wish to run on a TPU, and
   reads ranks and devices by that before it builds anything of ours; where ranks do not find each other,
   or one of fairseq's own collectives fails, no code of ours is nearer that could say who is missing;
   where models are used, ranks that share experts serve each other until all are done, which no one
   function of theirs knows; a training, a dense one too, has its --save-dir to itself until it ends; and a
   task without a dataclass is given no way to the run's configuration.
6. `FP16Optimizer.build_optimizer`: it copies all half parameters to fp32 before it builds an optimizer
   of ours, which may be there to keep a shard of them. (As --memory-efficient-fp16 it would not, but its
   name stands in checkpoints, which runs with and without shards are to read of each other.)

What else changes in a process, and where:

- at import (`plugin.register`): thresholds of glibc's malloc, and which classes torch.load takes for safe;
  twins in fairseq's and hydra's registries (`optim`, `criterions`, `models`, `tasks`); the options of every
  task, of a user's own when it is there (`task_options.py`); --is-moe leaves sys.argv, under --user-dir;
- where a model with experts is built: the run's configuration (`run_config.complete`, each change logged),
  the class of a task that has not our mixin, and then that of its iterator (`task.py`);
- where commands run: `train` and `run` add --user-dir to sys.argv, and `run` takes its command out;
  torchrun's ranks go into the configuration, and a rank's GPU becomes torch's current one (`startup.py`);
  ranks that use a model write their results apart, and without a GPU fairseq's all_gather_list gets buffers
  on the CPU (`parallel_inference.py`); torch's groups get time-outs (`ranks/guard.py`), and a thread of
  ours leaves before the process does (`comm/background.py`);
- where a training diagnoses a NaN: hooks of encoders' backwards go before stock looks for it (`task.py`).

No environment variable is set, and no logger but our own is touched.
"""

import functools
import hashlib
import inspect
import logging
import os
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.trainer import Trainer

from fairseq_tutel.checkpoint import experts, files
from fairseq_tutel.checkpoint.shards import bind
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.optim.moe_optimizer import ONLY_OF_RANK, MoEOptimizerMixin, innermost_optimizer
from fairseq_tutel.optim.zero_fp16 import ShardedFP16Optimizer
from fairseq_tutel.optim.zero_plan import plan_of
from fairseq_tutel.plugin import one_writer
from fairseq_tutel.plugin.flags import refuse_misspelt
from fairseq_tutel.plugin.opened_file import (
    NOT_FAIRSEQS,
    is_of_the_machine,
    not_fairseqs,
    refuse_torn,
    refuse_unknown_classes,
)
from fairseq_tutel.plugin.parallel_inference import OnSeveralRanks
from fairseq_tutel.plugin.run_config import KeepRoot, mark_as_opened, refuse_backend, saves_shards
from fairseq_tutel.plugin.startup import (
    drop_tpu,
    join_torchrun,
    meeting_of,
    read_on_every_rank,
    refusals_are_sentences,
)
from fairseq_tutel.ranks import groups, rendezvous
from fairseq_tutel.ranks.first import of_first
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


# The save that runs, if any: what it writes has all ranks' experts.
_saving: list[Any] = []


def save_checkpoint(original: Any) -> Any:
    """Gather experts and their optimizer state to rank 0, or write them, then do what stock does."""

    @functools.wraps(original)
    def wrapper(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
        if cfg.no_save:
            return original(cfg, trainer, epoch_itr, val_loss)
        _saving.append(trainer)
        try:
            _complete(cfg, trainer, epoch_itr, val_loss)
            return original(cfg, trainer, epoch_itr, val_loss)
        finally:
            _saving.pop()

    return wrapper


def _complete(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> None:
    """Let rank 0's next state hold what all ranks have, where ranks share it. Collective."""
    inner, place = innermost_optimizer(trainer.optimizer), groups.in_use()
    model = trainer.get_model()
    has_experts = bool(experts.expert_modules(model))
    in_shards = saves_shards(trainer.task) and has_experts
    shared = (place.expert_parallel_size > 1 and has_experts) or getattr(inner, "is_apart", False)
    if (in_shards or shared) and not will_save(cfg, trainer, epoch_itr, val_loss):
        return
    one_writer.confirm()
    with_state = not cfg.no_save_optimizer_state
    if in_shards:
        # A composite optimizer, which one rank alone may have, keeps its states in the file.
        by_parameter = with_state and hasattr(inner.optimizer, "state")
        write_in_shards(trainer, inner if by_parameter else None, place)
    elif shared:
        experts.gather_experts(model, place)
        if with_state:
            inner.gather_state(place)


def will_save(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> bool:
    """Return whether stock, which asks all ranks for their parts first, will write a file. Collective.

    Args are those of `checkpoint_utils.save_checkpoint`, before it runs.
    """
    if not cfg.no_last_checkpoints:
        return True
    if epoch_itr.end_of_epoch():
        regular = not cfg.no_epoch_checkpoints and epoch_itr.epoch % cfg.save_interval == 0
    else:
        updates, interval = trainer.get_num_updates(), cfg.save_interval_updates
        regular = interval > 0 and updates % interval == 0
    best_of = max if cfg.maximize_best_checkpoint_metric else min
    before = getattr(checkpoint_utils.save_checkpoint, "best", val_loss)
    best = val_loss is not None and val_loss == best_of(val_loss, before)
    among_best = val_loss is not None and cfg.keep_best_checkpoints > 0
    return of_first(lambda: regular or best or among_best, "the agreement on what is saved")


def write_in_shards(trainer: Trainer, inner: MoEOptimizerMixin | None, place: Any) -> None:
    """Let every rank write its experts, with their state; the checkpoint saved next says where. Collective.

    Args:
        trainer: that saves.
        inner: the optimizer whose state is saved; None for none.
        place: of this rank.
    """
    model, save_dir = trainer.get_model(), Path(trainer.cfg.checkpoint.save_dir)
    # The optimizer knows parameters by their place in this list, and where they are half, masters of them.
    trained = getattr(trainer.optimizer, "fp16_params", None) or (
        inner.model_params() if inner else []
    )
    index_of = {id(parameter): index for index, parameter in enumerate(trained)}

    def states(parameter: Any) -> Any:
        index = index_of.get(id(parameter))
        return {} if inner is None or index is None else inner.expert_state(index)

    records = experts.save_in_shards(model, place, states, save_dir)
    if inner is None:
        return
    by_index: dict[int, dict[str, Any]] = {}
    for layer, stack in model.named_modules():
        if isinstance(stack, ExpertStack):
            for name, parameter in stack.expert_parameters().items():
                if id(parameter) in index_of:
                    by_index[index_of[id(parameter)]] = {
                        tensor.removeprefix(f"{name}."): record
                        for (of_layer, tensor), record in records.items()
                        if of_layer == layer and tensor.startswith(f"{name}.")
                    }
    inner.save_state(by_index, place)


def load_checkpoint_to_cpu(original: Any) -> Any:
    """Refuse what is damaged or foreign; make what stands for experts in shard files readable.

    Each rank will read its own part of these.
    """

    @functools.wraps(original)
    def wrapper(path: str, arg_overrides: Any = None, load_on_all_ranks: Any = None) -> Any:
        refuse_misspelt(arg_overrides or {})
        # The Trainer alone says it: its file was checked before, and its options are the command line's.
        is_for_use = load_on_all_ranks is None
        if is_for_use:
            refuse_torn(path)
        try:
            state = original(path, arg_overrides, bool(load_on_all_ranks))
        except NOT_FAIRSEQS as error:
            if is_of_the_machine(error):
                raise
            raise not_fairseqs(path, error) from error
        if is_for_use:
            refuse_unknown_classes(state, path, arg_overrides)
            mark_as_opened(state)
        bind(state, Path(path))
        return state

    return wrapper


def copy(original: Any) -> Any:
    """Copy under a temporary name, then rename: the destination is complete or what it was before."""

    @functools.wraps(original)
    def wrapper(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not PathManager.supports_rename(dst_path):
            return original(src_path, dst_path, overwrite)
        # Where a link leads, as stock does, which writes through it.
        with files.replacing(os.path.realpath(dst_path)) as temporary:
            copied = files.share(src_path, temporary) or original(src_path, temporary, True)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        return dst_path if isinstance(copied, str) else copied

    return wrapper


def persistent_save(original: Any) -> Any:
    """Write local files under a name of their own; a second try begins at the first byte."""

    @functools.wraps(original)
    def wrapper(obj: Any, filename: Any, async_write: bool = False) -> None:
        state = obj.get("last_optimizer_state") if isinstance(obj, dict) else None
        is_part = ONLY_OF_RANK in (state or {})
        if (is_part or groups.in_use().expert_parallel_size > 1) and not _saving:
            # As stock does on an exception; the other ranks may be gone.
            name = os.path.basename(filename)
            logger.warning(
                "%s will hold this rank's experts or shards only, and can not be resumed from", name
            )
        if async_write or not PathManager.supports_rename(filename):
            original(obj, filename, async_write)
        else:
            files.save(obj, filename)

    return wrapper


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
        on_each = KeepRoot(OnSeveralRanks(main))
        if cfg.common_eval.path is None:
            on_each = KeepRoot(one_writer.OneWriter(main))
            read_on_every_rank(cfg)
            if hasattr(cfg.model, "moe_freq"):  # before stock looks for fairscale
                refuse_backend(cfg.distributed_training)
        if cfg.distributed_training.distributed_init_method == "env://" and keeps_the_store():
            cfg.distributed_training.distributed_init_method = rendezvous.METHOD
        with guarded("a collective of fairseq's own", timed=False), meeting_of(cfg) as met:

            def met_main(*args: Any, **kwargs: Any) -> Any:
                met()
                return on_each(*args, **kwargs)

            # Processes that fairseq itself spawns get what can be pickled.
            return original(cfg, met_main if met else on_each, **kwargs)

    return wrapper


def build_optimizer(original: Any) -> Any:
    """Build the wrapper of an optimizer of shards, where the run asks for these; tell others of masters."""

    @functools.wraps(original)
    def wrapper(cls: type, cfg: Any, params: Any, **kwargs: Any) -> Any:
        if plan_of(cfg) is not None:
            return ShardedFP16Optimizer.build_optimizer(cfg, params, **kwargs)
        optimizer = original(cls, cfg, params, **kwargs)
        if isinstance(optimizer.fp32_optimizer, MoEOptimizerMixin):
            optimizer.fp32_optimizer.holds_masters = True
        return optimizer

    return wrapper


# Owner, name and wrapper of each, the parameters it is called with, and the digest of its source.
WRAPPED = (
    (checkpoint_utils, "save_checkpoint", save_checkpoint,
     "cfg trainer epoch_itr val_loss", "61513534b9b3"),
    (checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu,
     "path arg_overrides load_on_all_ranks", "96f7d33cde8e"),
    (checkpoint_utils, "torch_persistent_save", persistent_save,
     "obj filename async_write", "5f397c23bc88"),
    (PathManager, "copy", copy, "src_path dst_path overwrite", "1d3c09d3f196"),
    (distributed_utils, "call_main", call_main, "cfg main kwargs", "c2a32fa44fa2"),
    (FP16Optimizer, "build_optimizer", build_optimizer, "cfg params kwargs", "c7ff6d890b7d"),
)  # fmt: skip


def install() -> None:
    """Install the wrappers; called once, at import."""
    for owner, name, _, parameters, digest in WRAPPED:
        _guard(getattr(owner, name), tuple(parameters.split()), digest)
    for owner, name, wrap, *_ in WRAPPED:
        as_it_stands = inspect.getattr_static(owner, name)
        if isinstance(as_it_stands, staticmethod | classmethod):
            setattr(owner, name, type(as_it_stands)(wrap(as_it_stands.__func__)))
        else:
            setattr(owner, name, wrap(as_it_stands))


install()
