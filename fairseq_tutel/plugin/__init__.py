"""register(): everything a `--user-dir` import does, once."""

import argparse
import atexit
import ctypes
import importlib
import logging
import sys
from typing import Any

import torch

from fairseq_tutel.checkpoint.files import let_checkpoints_load

logger = logging.getLogger(__name__)

_registered = False

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
GIB, MIB = 2**30, 2**20


def register() -> None:
    """Register models, criterions, tasks and optimizers with fairseq and install its few wrappers.

    Raises:
        ImportError: fairseq is missing, or is one this plugin was not written for.
    """
    global _registered
    if _registered:
        return
    _check_fairseq()
    from fairseq.data import Dictionary  # checkpoints of speech tasks hold it

    let_checkpoints_load(Dictionary)
    keep_freed_memory()
    _registered = True  # the models call this, too
    try:
        for module in ("plugin.registration.wrapped", "optim", "criterions", "tasks", "models"):
            importlib.import_module(f"fairseq_tutel.{module}")
    except ImportError:
        _registered = False
        raise
    if has_user_dir(sys.argv):  # else the words are another program's
        _refuse_flags_of_a_moe_twin(sys.argv[1:])
        _tell_of_misspelt_flags(sys.argv[1:])
        _drop_is_moe(sys.argv)


def _check_fairseq() -> None:
    try:
        import fairseq
    except ImportError as error:
        raise ImportError(
            "fairseq is not installed; `pip install fairseq-fixed 'numpy<2'` (it imports as fairseq)."
        ) from error
    if hasattr(fairseq, "modules") and hasattr(fairseq.modules, "moe"):
        raise ImportError(
            "this fairseq is Meta's moe branch, whose MoE layers clash with the plugin's; install the "
            "main line: `pip install fairseq-fixed`."
        )
    found = fairseq.__version__
    if not found.startswith("0.12."):
        raise ImportError(
            f"fairseq is version {found}; fairseq_tutel needs 0.12 (PyPI package fairseq-fixed)."
        )


def twin_of(stock: type, *before: type, module: str, **attributes: Any) -> type:
    """Return the twin of a stock class of fairseq, under its name with MoE in front.

    Args:
        stock: the class.
        before: classes that go before it.
        module: where the twin stands, so that it can be pickled.
        attributes: of the twin.
    """
    name = f"MoE{stock.__name__}"
    twin = type(
        name, (*before, stock), {"__doc__": stock.__doc__, "__module__": module, **attributes}
    )
    setattr(sys.modules[module], name, twin)
    return twin


def keep_freed_memory() -> bool:
    """Keep freed host memory in the process, where there is glibc and no GPU; return whether it was done.

    By default glibc gives a large tensor back to the system when it is freed; the next one of its size is
    then mapped and zeroed page by page, every step. The stacked gradients of experts are such tensors.
    """
    if torch.cuda.is_available() or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {M_MMAP_THRESHOLD: GIB, M_TRIM_THRESHOLD: 2 * GIB - 1, M_TOP_PAD: 64 * MIB}
    done = [mallopt(parameter, value) == 1 for parameter, value in wanted.items()]
    return all(done)


def _drop_is_moe(argv: list[str]) -> None:
    """Take Meta's --is-moe out of the command line: their evaluation needs it, ours reads the checkpoint.

    No registry reaches the parsers of fairseq-eval-lm and its like, which read sys.argv after this import.
    """
    if "--is-moe" in argv:
        argv.remove("--is-moe")
        logger.info("--is-moe is not needed: a checkpoint says so itself")


def has_user_dir(argv: list[str]) -> bool:
    """Whether these are the words of one of fairseq's commands, which the plugin is loaded by."""
    return any(word.split("=")[0] == "--user-dir" for word in argv)


def _tell_of_misspelt_flags(argv: list[str]) -> None:
    """Say which flag was meant, last of all: argparse will end the process with its long usage before."""
    from fairseq_tutel.moe.options import flag_of, key_of
    from fairseq_tutel.plugin.registration.flags import meant

    for word in argv:
        flag = word.split("=")[0]
        close = meant(key_of(flag)) if flag.startswith("--") else None
        if close:
            atexit.register(_tell_of_misspelt_flag, flag, flag_of(close))


def _tell_of_misspelt_flag(flag: str, close: str) -> None:
    logger.warning("%s is none of the flags here; %s is", flag, close)


def flags_were_known() -> None:
    """Take back what was said of misspelt flags: argparse knew them, as those of another model."""
    atexit.unregister(_tell_of_misspelt_flag)


def _refuse_flags_of_a_moe_twin(argv: list[str]) -> None:
    """End a command line that gives MoE model flags to a dense architecture with a twin, with one sentence.

    argparse would only call the flags unrecognized. An architecture that is not known yet is a user's own.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_tutel.moe.config import options_of

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--arch", "-a")
    arch = parser.parse_known_args(argv)[0].arch
    if arch not in ARCH_MODEL_REGISTRY or f"moe_{arch}" not in ARCH_MODEL_REGISTRY:
        return
    known = {option.flag for option in options_of("model")}
    given = [a for a in argv if a.split("=")[0] in known]
    if given:
        sys.exit(
            f"error: {given[0]} was given with --arch {arch}, which is dense; choose --arch "
            f"moe_{arch} or drop the flag."
        )
