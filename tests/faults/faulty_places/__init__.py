"""A --user-dir that loads the plugin and injects a fault at one place in a training run.

The environment variable FAULT has the fields of a `Trial` as JSON, and the paths `save_dir` and `marker`.
The file `marker` is written just before the fault, so that a restarted run does not repeat the fault.
"""

import io
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer

from fairseq_tutel.checkpoint import experts
from fairseq_tutel.parallel import collectives
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.training.task import MoETaskMixin

register()

_fault = json.loads(os.environ["FAULT"])
_rank = int(os.environ.get("RANK", "0"))
_happened = Path(_fault["marker"]).exists()
_times: dict[str, int] = {}

LIMIT = 120_000


def is_due(place):
    """Return whether the fault must happen now, and write the file `marker` in this case."""
    _times[place] = _times.get(place, 0) + 1
    here = _fault["place"] == place and _rank == _fault["rank"] and not _happened
    due = here and _times[place] == _fault["when"]
    if due:
        Path(_fault["marker"]).write_text(f"{_fault['what']} in {place} {_fault['when']}\n")
    return due


def reach(place):
    """Inject the fault if the rank has reached the place and time of the fault."""
    if is_due(place):
        happen()


def happen():
    """Inject the fault into this process."""
    what = _fault["what"]
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "error":
        raise OSError(5, "an injected fault: Input/output error")
    elif what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    elif what == "signal":
        os.kill(os.getpid(), getattr(signal, _fault["number"]))
    elif what == "full":  # A log is smaller than LIMIT, and a checkpoint is larger.
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))


def before(owner, name, place):
    """Wrap the function `owner.name`, so that each call can inject the fault first."""
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        reach(place)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def break_numbers(original):
    """Wrap the training step of a task, so that the fault sets the embeddings of a batch to NaN."""

    def wrapper(self, sample, model, *args, **kwargs):
        if _fault["what"] != "nan":
            reach("train")
        elif is_due("train"):
            embedding = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
            hook = embedding.register_forward_hook(lambda _m, _i, y: y.fill_(torch.nan))
            try:
                return original(self, sample, model, *args, **kwargs)
            finally:
                hook.remove()
        return original(self, sample, model, *args, **kwargs)

    return wrapper


def break_batches(original):
    """Wrap Trainer.train_step, so that the fault replaces the last micro-batch by an empty batch."""

    def wrapper(self, samples, *args, **kwargs):
        if is_due("samples"):
            samples = [*samples[:-1], {}]
        return original(self, samples, *args, **kwargs)

    return wrapper


def ruin(original):
    """Wrap the optimizer step of a task, so that the fault sets one element of a tensor to NaN
    afterwards."""

    def wrapper(self, optimizer, model, update_num):
        original(self, optimizer, model, update_num)
        if is_due("update"):
            inner = innermost_optimizer(optimizer)
            zero = getattr(inner, "zero", None)
            master = list(zero.parameters if zero else inner.params)[-1]
            tensors = {
                "expert": lambda: next(p for name, p in model.named_parameters() if ".experts." in name),
                "master": lambda: master,
                "exp_avg_sq": lambda: inner.optimizer.state[master]["exp_avg_sq"],
            }
            tensors[_fault["what"]]().data.view(-1)[-1] = torch.nan

    return wrapper


def write_in_two(original):
    """Wrap torch.save, so that the fault happens after half of the bytes are written."""

    def wrapper(obj, file, *args, **kwargs):
        if isinstance(file, io.BytesIO) or not is_due("write"):
            return original(obj, file, *args, **kwargs)
        whole = io.BytesIO()
        original(obj, whole, *args, **kwargs)
        content = whole.getvalue()
        part = len(content) // 2
        file.write(content[:part])
        file.flush()
        happen()
        file.write(content[part:])
        return None

    return wrapper


def copy_in_two(original):
    """Wrap shutil.copyfile, so that the fault happens after half of the bytes are copied."""

    def wrapper(source, destination, **kwargs):
        ours = str(destination).startswith(_fault["save_dir"])
        if not ours or not is_due("copy"):
            return original(source, destination, **kwargs)
        content = Path(source).read_bytes()
        with open(destination, "wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            happen()
        return original(source, destination, **kwargs)

    return wrapper


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"),
    *("broadcast", "gather", "barrier", "reduce_scatter", "batch_isend_irecv"),
)

for name in COLLECTIVES:
    before(dist, name, "collective")
# collectives.py has its own names for two torch functions, which the patches of dist above do not reach.
for name in ("_reduce_scatter", "_all_gather"):
    before(collectives, name, "collective")
FairseqTask.train_step = break_numbers(FairseqTask.train_step)
before(FairseqTask, "valid_step", "valid")
before(Trainer, "__init__", "built")
before(SequenceGenerator, "generate", "generate")
MoETaskMixin.optimizer_step = ruin(MoETaskMixin.optimizer_step)
Trainer.train_step = break_batches(Trainer.train_step)
before(experts, "write_file", "shard")
torch.save = write_in_two(torch.save)
shutil.copyfile = copy_in_two(shutil.copyfile)
reach("import")
