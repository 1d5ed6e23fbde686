"""How a run starts: torchrun's ranks meet, were started alike, and none waits for ever; and how it ends.

First what a process needs before fairseq's main runs in it, and how it ends where a run cannot work; then
what ranks compare before the first collective of a training.
"""

import argparse
import atexit
import contextlib
import dis
import functools
import hashlib
import importlib.util
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from fairseq import __version__ as fairseq_version
from fairseq.data.iterators import BackgroundConsumer
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf, open_dict
from torch import nn

from fairseq_tutel import __version__
from fairseq_tutel.files.small import error_line
from fairseq_tutel.moe.config import TaskConfig
from fairseq_tutel.moe.options import flag_of, read
from fairseq_tutel.plugin.plans import plans_of, prove_once_a_host
from fairseq_tutel.plugin.registration.stock_errors import sentence_of
from fairseq_tutel.plugin.training.checks import config_of, device_of
from fairseq_tutel.ranks import guard
from fairseq_tutel.ranks.agreement import agree
from fairseq_tutel.ranks.rendezvous import meeting, own_gpu

logger = logging.getLogger(__name__)

# A reader that is stuck in a file system, say, does not keep the process longer.
SECONDS_FOR_READERS = 10.0


def end_readers() -> None:
    """End the threads that read fairseq's batches ahead, before the interpreter goes.

    A training that ends in the middle of an epoch leaves one behind; where it is within an operation of
    torch by then, the finished process aborts ("terminate called without an active exception", exit 134).
    """
    until = time.monotonic() + SECONDS_FOR_READERS
    for reader in threading.enumerate():
        if isinstance(reader, BackgroundConsumer):
            reader._max_len = 0  # it leaves after the batch that it is at
            while reader.is_alive() and time.monotonic() < until:
                with contextlib.suppress(queue.Empty):
                    reader._queue.get_nowait()
                reader.join(0.01)


_at_end: list[Callable[[], None]] = []


def call_at_end(function: Callable[[], None]) -> None:
    """Call a function when this process ends, before the final error line."""
    if not _at_end:
        atexit.register(_end_calls)
    _at_end.append(function)


def _end_calls() -> None:
    while _at_end:
        _at_end.pop(0)()


@contextlib.contextmanager
def refusals_are_sentences() -> Iterator[None]:
    """End this process with the sentence of a refusal as its last line."""
    try:
        yield
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        sys.exit(_last_line(error, sentence))


def _last_line(error: BaseException, sentence: str) -> str:
    """Return the line that a refusal ends this process with, after all that is logged before it."""
    _end_calls()
    # Not the level of the logger: a module of fairseq's wav2vec2 sets the root's to DEBUG.
    if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        logger.debug("refused here", exc_info=error)
    return error_line(sentence)


def _sentence(error: BaseException) -> str | None:
    """Return the one sentence that a user needs of an error; None where its traceback says more."""
    return str(error) if _is_refusal(error) else sentence_of(error)


def _is_refusal(error: BaseException | None) -> bool:
    """Whether this is a ValueError that a `raise` of our own code raised.

    Those of other code are none, nor those of our mistakes, such as a tuple of another length.
    """
    trace: Any = None if error is None else error.__traceback__
    if trace is None or not isinstance(error, ValueError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    is_ours = frame.f_globals["__name__"].partition(".")[0] == __name__.partition(".")[0]
    return is_ours and frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def excepthook(original: Any) -> Any:
    """Let a process that a refusal ends print its sentence: fairseq-generate's main is not wrapped."""

    @functools.wraps(original)
    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        sentence = _sentence(error)
        if sentence is None:
            _end_calls()
            original(kind, error, trace)
        else:
            print(_last_line(error, sentence), file=sys.stderr)

    return hook


def read_on_every_rank(cfg: Any) -> None:
    """Let every rank of a training read the checkpoint that it goes on from.

    Stock broadcasts rank 0's through an unpickler that torch >= 2.6 refuses.
    """
    key = "load_checkpoint_on_all_dp_ranks"
    if cfg.distributed_training.distributed_world_size > 1 and not cfg.checkpoint[key]:
        logger.info("set --load-checkpoint-on-all-dp-ranks, which torch >= 2.6 needs")
        cfg.checkpoint[key] = True


def drop_tpu(cfg: Any) -> None:
    """Let --bf16 mean bf16; fairseq-train takes it for a wish to run on a TPU too."""
    no_tpu = torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is None
    if cfg.common.tpu and cfg.common.bf16 and no_tpu:
        for section in cfg.values():
            if OmegaConf.is_dict(section) and "tpu" in section:
                section.tpu = False


def join_torchrun(cfg: Any) -> None:
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
        distributed.device_id = 0 if on_cpu else own_gpu()
        distributed.distributed_num_procs = 1
        if on_cpu:
            distributed.distributed_backend = "gloo"
            # The default, which needs a GPU, by its two names; what else was asked for is kept, or refused.
            if distributed.ddp_backend in ("pytorch_ddp", "c10d"):
                distributed.ddp_backend = "legacy_ddp"
    if not on_cpu:
        torch.cuda.set_device(distributed.device_id)


def _torchrun_world_size() -> int:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def meeting_of(cfg: Any) -> contextlib.AbstractContextManager[Any]:
    """Return what this process meets the others in; nothing where it is alone, or spawns them."""
    distributed = cfg.distributed_training
    if distributed.distributed_init_method is None or not distributed.distributed_no_spawn:
        return contextlib.nullcontext()
    seconds = read(TaskConfig, cfg.task).moe_comm_timeout
    return meeting(
        distributed.distributed_rank,
        distributed.distributed_world_size,
        seconds if guard.is_time(seconds) else 0,  # refused later, by its name
    )


# What a rank may have of its own: its place, its files, how it loads and logs. Paths may differ too.
OF_ONE_RANK = {
    *("distributed_rank", "device_id", "shard_id", "distributed_init_method", "distributed_port"),
    *("distributed_no_spawn", "distributed_num_procs", "nprocs_per_node", "heartbeat_timeout"),
    *("data", "save_dir", "restore_file", "finetune_from_model", "user_dir", "num_workers"),
    *("num_workers_valid", "data_buffer_size", "dataset_impl", "use_plasma_view", "plasma_path"),
    *("no_progress_bar", "log_interval", "log_format", "log_file", "tensorboard_logdir"),
    *("wandb_project", "azureml_logging", "aim_repo", "aim_run_hash", "profile", "reset_logging"),
    *("suppress_crashes", "empty_cache_freq", "keep_last_epochs", "keep_best_checkpoints"),
    *("keep_interval_updates", "keep_interval_updates_pattern"),
}
# Sections of fairseq's configuration that training does not read.
OF_OTHER_COMMANDS = {"common_eval", "generation", "eval_lm", "interactive"}


def start_together(root: Any, model: nn.Module, task: Any) -> None:
    """Compare what all ranks were started with, and set the time-out of their collectives.

    Args:
        root: the FairseqConfig of a training.
        model: the stock model, before its FFNs are replaced.
        task: the fairseq task.

    Raises:
        ValueError: ranks differ, or --moe-comm-timeout is no time.
        CommunicationError: a rank did not come within --moe-comm-timeout.
    """
    set_timeout(config_of(task))
    if not dist.is_initialized():
        return
    prove_once_a_host(config_of(task))
    agree(facts_of(root, model, task))
    limit_fairseqs_own()
    let_stock_gather(root)


def set_timeout(task_cfg: Any) -> None:
    """Give the groups that are made from now on the time-out of a task's configuration.

    Raises:
        ValueError: --moe-comm-timeout is no time.
    """
    guard.set_timeout(read(TaskConfig, task_cfg).moe_comm_timeout)


def limit_fairseqs_own() -> None:
    """Give fairseq's groups the time-out too. Collective."""
    # fairseq makes a group of its own for gradients and logs, later, with torch's own time-out.
    operation = "the creation of fairseq's group of all ranks"
    with guard.watched(operation), guard.guarded(operation):
        of_fairseq = distributed_utils.get_global_group()
    for group in (None, of_fairseq):
        guard.limit(group)


def let_stock_gather(cfg: Any) -> None:
    """On a CPU, give the function that gathers logs that cannot be summed the buffers it wants of a GPU."""
    if not torch.cuda.is_available():
        size, gather = cfg.common.all_gather_list_size, distributed_utils.all_gather_list
        gather._buffer = torch.empty(size * dist.get_world_size(), dtype=torch.uint8)
        gather._cpu_buffer = torch.empty(size, dtype=torch.uint8)


def facts_of(root: Any, model: nn.Module, task: Any) -> dict[str, Any]:
    """Return all that decides shapes, collectives and results, by option or by what it is."""
    facts: dict[str, Any] = {}
    for name in root:
        if name not in OF_OTHER_COMMANDS:
            facts |= _options(root[name])
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    facts["the model's number of parameters"] = sum(p.numel() for p in model.parameters())
    facts["the digest of the model's parameter shapes"] = _digest(shapes)
    for side in ("source_dictionary", "target_dictionary"):
        words = getattr(getattr(task, side, None), "symbols", None)
        facts[f"the digest of the {side.replace('_', ' ')}"] = _digest(words)
    for each in plans_of(config_of(task)):
        facts[f"the digest of the plan {each.name}"] = each.plan.digest
    facts["the kind of device"] = device_of(root).type
    facts["the version of fairseq_tutel"] = __version__
    facts["the version of fairseq"] = fairseq_version
    facts["the version of torch"] = torch.__version__
    return facts


def _options(section: Any) -> dict[str, Any]:
    """Return a section's options that ranks must share, as flags."""
    if OmegaConf.is_config(section):
        section = OmegaConf.to_container(section, resolve=True, enum_to_str=True)
    elif isinstance(section, argparse.Namespace):
        section = vars(section)
    if not isinstance(section, dict):
        return {}
    return {
        flag_of(key): value
        for key, value in section.items()
        if key not in OF_ONE_RANK and not key.startswith("_") and "/" not in str(value)
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
