"""A --user-dir that loads the plugin and then breaks one rank on purpose.

FAULT is "where:when:what": where = step (a training forward), save (half of a checkpoint is
written), copy (half of checkpoint_last is written), generate (a batch is decoded) or update (after an
optimizer's step); when = the how-many-th call; what = kill, stop (until somebody lets it go on), oom,
error, full (the disk is full), nan, or after an update oom or the tensor that gets a NaN: expert, master
or exp_avg_sq. FAULT_RANK is the rank it happens on.
"""

import os
import resource
import signal

import torch
from fairseq import file_io
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.sequence_generator import SequenceGenerator

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.training.task import MoETaskMixin

register()

_calls = {"step": 0, "save": 0, "copy": 0, "generate": 0, "update": 0}


def _fault(where):
    """Return what shall happen at this call, or None."""
    place, when, what = os.environ["FAULT"].split(":")
    if place != where or os.environ.get("RANK", "0") != os.environ.get("FAULT_RANK", "0"):
        return None
    _calls[where] += 1
    return what if _calls[where] == int(when) else None


def _fill_the_disk():
    # Below a checkpoint's size; above that of the log, which is a file too.
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, resource.RLIM_INFINITY))


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _forward(original):
    def wrapper(self, model, sample, reduce=True):
        what = _fault("step") if model.training else None
        if what == "kill":
            _kill()
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "oom":
            _run_out_of_memory()
        if what == "error":
            raise KeyError("a broken sample")
        if what == "full":
            _fill_the_disk()
        if what == "nan":
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return original(self, model, sample, reduce)

    return wrapper


def _save(original):
    def wrapper(obj, file, *args, **kwargs):
        what = _fault("save")
        if what == "kill":
            file.write(b"PK half a checkpoint")
            file.flush()
            _kill()
        if what == "full":
            _fill_the_disk()
        return original(obj, file, *args, **kwargs)

    return wrapper


def _generate(original):
    def wrapper(*args, **kwargs):
        if _fault("generate") == "error":
            raise KeyError("a broken sample")
        return original(*args, **kwargs)

    return wrapper


def _copyfile(original):
    def wrapper(source, destination):
        if _fault("copy") == "kill":
            with open(source, "rb") as a, open(destination, "wb") as b:
                b.write(a.read(4096))
            _kill()
        return original(source, destination)

    return wrapper


def _optimizer_step(original):
    def wrapper(self, optimizer, model, update_num):
        original(self, optimizer, model, update_num)
        what, inner = _fault("update"), innermost_optimizer(optimizer)
        if what == "oom":
            _run_out_of_memory()
        if what is not None:
            zero = getattr(inner, "zero", None)
            own = list(zero.parameters if zero else inner.params)[-1]
            ruined = {
                "expert": lambda: next(
                    own for name, own in model.named_parameters() if ".experts." in name
                ),
                "master": lambda: own,
                "exp_avg_sq": lambda: inner.optimizer.state[own]["exp_avg_sq"],
            }[what]()
            ruined.data.view(-1)[-1] = float("nan")

    return wrapper


MoETaskMixin.optimizer_step = _optimizer_step(MoETaskMixin.optimizer_step)
CrossEntropyCriterion.forward = _forward(CrossEntropyCriterion.forward)
torch.save = _save(torch.save)
SequenceGenerator.generate = _generate(SequenceGenerator.generate)
file_io.shutil.copyfile = _copyfile(file_io.shutil.copyfile)
