"""All that is wrapped in fairseq: six functions, each because no registry or override reaches it.

1. `Trainer.consolidate_optimizer`: every rank calls it before rank 0 alone saves, also with
   --no-save-optimizer-state, so it is the one place where experts can be gathered, or written by all;
   stock decides later whether it saves anything, so that is asked of what its caller has.
2. `checkpoint_utils.load_checkpoint_to_cpu`: who loads a state does not know where its file stood, and
   experts in shard files stand beside it; and no one else stands at every door by which a file comes in
   that is to be used, damaged or foreign as it may be.
3. `PathManager.copy`: stock copies over checkpoint_last and checkpoint_best in place, and a kill in
   the middle leaves a torn file; no copy shares its bytes where the file system could.
4. `distributed.utils.call_main`: under torchrun on CPU stock fairseq divides by the number of GPUs, or
   trains N unrelated models into one folder; fairseq-train takes --bf16 for a wish to run on a TPU, and
   reads ranks and devices by that before it builds anything of ours; where ranks do not find each other,
   or one of fairseq's own collectives fails, no code of ours is nearer that could say who is missing;
   where models are used, ranks that share experts serve each other until all are done, which no one
   function of theirs knows; a training, a dense one too, has its --save-dir to itself until it ends; and a
   task without a dataclass is given no way to the run's configuration.
5. `FP16Optimizer.build_optimizer`: it copies all half parameters to fp32 before it builds an optimizer
   of ours, which may be there to keep a shard of them.
6. `checkpoint_utils.torch_persistent_save`: after a write that failed stock goes on behind what that one
   left in the file, which then gets a checkpoint's name and cannot be opened; and two jobs share its
   temporary name.

What else changes in a process, each where it is done: thresholds of glibc's malloc (`allocator.py`); the
classes that torch.load takes for safe (`safe_globals.py`); --is-moe in sys.argv (`plugin.py`); the options
of every task (`task_options.py`); the class of a stock task and of its iterator (`task_mixin.py`); the
buffers of fairseq's all_gather_list (`together.py`); torch's time-outs of groups (`ranks/rendezvous.py`,
`ranks/guard.py`).
"""

import functools
import hashlib
import inspect
import logging
import os
import sys
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
from fairseq_tutel.optim.moe_optimizer import MoEOptimizerMixin, innermost_optimizer
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
from fairseq_tutel.plugin.run_config import KeepRoot, refuse_backend, saves_shards
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


def consolidate_optimizer(original: Any) -> Any:
    """Gather experts and their optimizer state to rank 0, or write them, then do what stock does."""

    @functools.wraps(original)
    def wrapper(self: Trainer) -> None:
        inner = innermost_optimizer(self.optimizer)
        if isinstance(inner, MoEOptimizerMixin):
            inner.holds_masters = isinstance(self.optimizer, FP16Optimizer)
        place, model = groups.in_use(), self.get_model()
        with_state = not self.cfg.checkpoint.no_save_optimizer_state
        shared = place.expert_parallel_size > 1 and experts.expert_modules(model)
        shared = shared or getattr(inner, "is_apart", False)
        in_shards = saves_shards(self.task) and experts.expert_modules(model)
        caller = sys._getframe(1)
        # train_step itself calls this only before it writes crash.pt: the others may be gone.
        if caller.f_code.co_name == "train_step":
            if shared:
                logger.warning(
                    "crash.pt will hold this rank's experts or shards only, and can not be resumed from"
                )
            original(self)
            return
        by_stock = caller.f_code.co_name == "save_checkpoint" and (in_shards or shared)
        if by_stock and not will_save(self, *map(caller.f_locals.get, ("epoch_itr", "val_loss"))):
            return
        one_writer.confirm()
        if in_shards:
            # A composite optimizer, which one rank alone may have, keeps its states in the file.
            by_parameter = with_state and hasattr(inner.optimizer, "state")
            write_in_shards(self, inner if by_parameter else None, place)
        elif shared:
            experts.gather_experts(model, place)
            if with_state:
                inner.gather_state(place)
        original(self)

    return wrapper


def will_save(trainer: Trainer, epoch_itr: Any, val_loss: float | None) -> bool:
    """Return whether stock, which asks all ranks for their parts first, will write a file. Collective.

    Args:
        trainer: that saves.
        epoch_itr: as `checkpoint_utils.save_checkpoint` takes it.
        val_loss: likewise.
    """
    cfg, updates = trainer.cfg.checkpoint, trainer.get_num_updates()
    if not cfg.no_last_checkpoints:
        return True
    if epoch_itr.end_of_epoch():
        regular = not cfg.no_epoch_checkpoints and epoch_itr.epoch % cfg.save_interval == 0
    else:
        regular = cfg.save_interval_updates > 0 and updates % cfg.save_interval_updates == 0
    # Stock has compared this loss with the best one already.
    best = val_loss is not None and val_loss == checkpoint_utils.save_checkpoint.best
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
    """Build the wrapper of an optimizer of shards, where the run asks for these."""

    @functools.wraps(original)
    def wrapper(cls: type, cfg: Any, params: Any, **kwargs: Any) -> Any:
        if plan_of(cfg) is not None:
            return ShardedFP16Optimizer.build_optimizer(cfg, params, **kwargs)
        return original(cls, cfg, params, **kwargs)

    return wrapper


def install() -> None:
    """Install the wrappers; called once, at import."""
    for function, parameters, digest in (
        (Trainer.consolidate_optimizer, "self", "54ef119c1663"),
        (
            checkpoint_utils.load_checkpoint_to_cpu,
            "path arg_overrides load_on_all_ranks",
            "96f7d33cde8e",
        ),
        (PathManager.copy, "src_path dst_path overwrite", "1d3c09d3f196"),
        (distributed_utils.call_main, "cfg main kwargs", "c2a32fa44fa2"),
        (FP16Optimizer.build_optimizer, "cfg params kwargs", "c7ff6d890b7d"),
        (checkpoint_utils.torch_persistent_save, "obj filename async_write", "5f397c23bc88"),
    ):
        _guard(function, tuple(parameters.split()), digest)
    Trainer.consolidate_optimizer = consolidate_optimizer(Trainer.consolidate_optimizer)
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu(
        checkpoint_utils.load_checkpoint_to_cpu
    )
    PathManager.copy = staticmethod(copy(PathManager.copy))
    distributed_utils.call_main = call_main(distributed_utils.call_main)
    stock = FP16Optimizer.build_optimizer.__func__
    FP16Optimizer.build_optimizer = classmethod(build_optimizer(stock))
    checkpoint_utils.torch_persistent_save = persistent_save(checkpoint_utils.torch_persistent_save)


install()
