"""Defines register(), which makes this package a fairseq plugin when --user-dir imports it.

The package plugin has these folders and files:

- registration/: defines options, registers classes, wraps fairseq functions and formats errors;
- install.py, feed_forward.py and announce.py: replace FFNs of a stock model by experts;
- criterions/ and optim/: losses and optimizers of models with experts;
- training/: checks options, and starts, resumes and saves a training run;
- opening/: loads a checkpoint for inference, with offloaded experts or on several ranks;
- run_state.py: the configuration and the process groups of the run.
"""

import ctypes
import functools
import importlib
import sys

# The parameters of mallopt have these numbers in glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
GIB, MIB = 2**30, 2**20
THRESHOLDS = {M_MMAP_THRESHOLD: GIB, M_TRIM_THRESHOLD: 2 * GIB - 1, M_TOP_PAD: 64 * MIB}


@functools.cache
def register() -> None:
    """Register models, criterions, tasks and optimizers with fairseq, and wrap some fairseq functions.

    Importing the models folder calls `register` a second time, which has no effect.

    Raises:
        ImportError: fairseq is missing or has an unsupported version.
    """
    _check_fairseq()
    from fairseq.data import Dictionary  # Checkpoints of speech tasks contain a Dictionary.

    from fairseq_tutel.checkpoint.files import let_checkpoints_load

    let_checkpoints_load(Dictionary)
    keep_freed_memory()
    for module in ("plugin.registration.wrapped", "plugin.optim", "plugin.criterions", "tasks", "models"):
        importlib.import_module(f"fairseq_tutel.{module}")
    from fairseq_tutel.plugin.registration.flags import drop_is_moe

    drop_is_moe(sys.argv)


def _check_fairseq() -> None:
    try:
        import fairseq
    except ImportError as error:
        raise ImportError(
            "fairseq is not installed; run `pip install --no-build-isolation fairseq-fixed`."
        ) from error
    found = fairseq.__version__
    if not found.startswith("0.12."):
        raise ImportError(
            f"fairseq has version {found}, but fairseq_tutel needs 0.12; install fairseq-fixed from PyPI."
        )


def keep_freed_memory() -> bool:
    """Configure glibc to keep freed host memory in the process; return whether glibc accepts the settings.

    On a machine with a GPU, the function changes nothing. By default glibc returns the memory of a large
    tensor, such as a gradient of stacked experts, to the system when the tensor is freed. In each
    training step, the system would then map memory again, and fill this memory with zeros.

    Example:
        >>> kept = ft.keep_freed_memory()  # once, at the start of a program
    """
    import torch

    # torch.cuda.is_available would initialize CUDA, which then fails in every forked child.
    if torch.cuda.device_count() or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # Only glibc has mallopt.
    done = [mallopt(parameter, value) == 1 for parameter, value in THRESHOLDS.items()]
    return all(done)
