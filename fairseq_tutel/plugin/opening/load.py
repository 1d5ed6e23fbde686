"""Loads checkpoint files safely: rejects damaged files and other formats, and runs no code in files."""

import argparse
import functools
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.utils import import_user_module
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fairseq_tutel.checkpoint.files import (
    IS_CORRUPT,
    NOT_A_FILE,
    is_not_a_file,
    is_whole,
    mapped,
    refused_class,
)
from fairseq_tutel.checkpoint.foreign import refuse_malformed, refuse_meta
from fairseq_tutel.checkpoint.saved import drop_retired
from fairseq_tutel.checkpoint.shards import bind
from fairseq_tutel.moe.config import label_of
from fairseq_tutel.option import is_custom
from fairseq_tutel.plugin.opening.literals import options_within, refuse_code
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.plugin.registration.flags import refuse_misspelt
from fairseq_tutel.plugin.registration.process import is_machine_error
from fairseq_tutel.plugin.run_state import OPENED, RUN
from fairseq_tutel.plugin.training.train_only import refuse_other_parts

# Environment variable that allows damaged files to be opened.
OPEN_DAMAGED = "FAIRSEQ_TUTEL_OPEN_DAMAGED"
# Types of errors that fairseq and torch raise for a file that is no checkpoint, or if memory runs out.
FOREIGN_FILE_ERRORS = (
    LookupError, TypeError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError,
    OmegaConfBaseException,
)  # fmt: skip


def load_checkpoint_to_cpu(original: Any) -> Any:
    """Wrap fairseq's load_checkpoint_to_cpu to reject unreadable files and to support shard files."""

    @functools.wraps(original)
    def wrapper(path: str, arg_overrides: Any = None, load_on_all_ranks: Any = None) -> Any:
        overrides = arg_overrides or {}
        refuse_misspelt(overrides)
        # Only fairseq's Trainer passes load_on_all_ranks. The Trainer's checkpoint was already
        # checked, and the Trainer's options come from the command line.
        is_for_use = load_on_all_ranks is None
        if is_not_a_file(path):
            raise ValueError(f"{path} is {NOT_A_FILE}, not a checkpoint; give a file.")
        try:
            if is_for_use:
                _refuse_damaged(path)
            with _mapped_files() if is_for_use else nullcontext():
                state = original(path, arg_overrides, bool(load_on_all_ranks))
            # A checkpoint's options may repeat values of the run's configuration, which are trusted.
            given = overrides if is_for_use else {**dict(options_within(RUN.cfg)), **overrides}
            refuse_code(state, path, given)
            refuse_malformed(state, path)
            cfg = state.get("cfg")
            with open_dict(cfg) if OmegaConf.is_config(cfg) else nullcontext():
                drop_retired(state, path)
            refuse_meta(state.get("model") or (), path)
            bind(state, Path(path))
            if is_for_use:
                _refuse_unknown_classes(state, path, overrides)
                if mark_as_opened(state):
                    refuse_code(state, path, overrides)  # The converted options are checked, too.
                _update_task(state, overrides)
            else:
                if RUN.loads_optimizer:
                    refuse_other_parts(RUN.cfg, state, path)
                _begin_average(state)
        except FOREIGN_FILE_ERRORS as error:
            if is_machine_error(error):
                raise
            raise _foreign_file(path, error) from error
        return state

    return wrapper


@contextmanager
def _mapped_files() -> Iterator[None]:
    """Context manager in which torch.load maps files, so weights are in memory only once, in the model.

    fairseq passes an open file to torch.load, but torch can map a file only by its path.
    """
    load = torch.load

    def mapped_load(file: Any, *args: Any, **kwargs: Any) -> Any:
        return mapped(file.name) if hasattr(file, "name") else load(file, *args, **kwargs)

    torch.load = mapped_load  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = load


def _refuse_damaged(path: str) -> None:
    """Raise an error if a local checkpoint file is damaged, because its weights may be wrong."""
    if os.path.isfile(path) and not os.environ.get(OPEN_DAMAGED) and not is_whole(path):
        raise ValueError(
            f"{path} is not a checkpoint, or one that {IS_CORRUPT}; give another file, or set "
            f"{OPEN_DAMAGED}=1 to open the file anyway."
        )


def _foreign_file(path: str, error: BaseException) -> ValueError:
    """Return a ValueError that explains why a file is not a checkpoint that fairseq can read."""
    refused = refused_class(error)
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    holds = f"it contains {refused}, which must not run" if refused else reason
    return ValueError(f"{path} is not a checkpoint that fairseq saved ({holds}); give another file.")


def mark_as_opened(state: Any) -> bool:
    """Mark the configuration in a checkpoint as opened for inference.

    Older files have an argparse namespace, which this function converts to a configuration before fairseq
    does. The return value is true if a namespace was converted.
    """
    is_older = state.get("args") is not None
    if is_older:
        state["cfg"], state["args"] = convert_namespace_to_omegaconf(state["args"]), None
    if OmegaConf.is_config(state.get("cfg")):
        state["cfg"]._set_flag(OPENED, True)  # Nested configurations inherit the flag.
    model = (state.get("cfg") or {}).get("model")
    if isinstance(model, argparse.Namespace):
        setattr(model, OPENED, True)
    return is_older


def _refuse_unknown_classes(state: Any, path: str, overrides: Mapping[str, Any]) -> None:
    """Raise an error if a checkpoint's options would import a module that the user did not name."""
    models = [state.get("args"), (state.get("cfg") or {}).get("model")]
    for field in ("gate_type", "expert_type"):
        key = f"moe_{field}"
        for value in [str(getattr(model, key, "")) for model in models if key not in overrides]:
            unknown = [n for n in map(str.strip, value.split(",")) if is_custom(n) and not _is_imported(n)]
            if unknown:
                raise ValueError(
                    f"{path} has the {label_of(field)} {unknown[0]}, but a checkpoint must not import "
                    "modules; if you trust this module, import it in --user-dir, or add "
                    f"--model-overrides \"{{'{key}': '{value}'}}\"."
                )


def _is_imported(name: str) -> bool:
    """Return whether the module of a class is already imported, or is in the --user-dir."""
    module = name.rpartition(".")[0]
    package = sys.modules.get(module.partition(".")[0])
    user_dirs: set[str] = getattr(import_user_module, "memo", set())
    return module in sys.modules or not user_dirs.isdisjoint(getattr(package, "__path__", ()))


def _update_task(state: Any, overrides: Mapping[str, Any]) -> None:
    """Update the task options of a checkpoint in place.

    The removed value `--moe-backend grouped_mm` becomes `auto`. Overrides of `SystemOptions` are added,
    because fairseq overrides only options that the file already has.
    """
    task: Any = (state.get("cfg") or {}).get("task")
    values = vars(task) if isinstance(task, argparse.Namespace) else task
    if values and str(values.get("moe_backend", "")) == "grouped_mm":
        values["moe_backend"] = "auto"
    if OmegaConf.is_config(task):
        known = {option.key for option in options_of("task")}
        with open_dict(task):
            task.update({k: v for k, v in overrides.items() if k in known})


def _begin_average(state: Any) -> None:
    """With --store-ema, start the moving average at the weights of a checkpoint that has no average.

    Without _begin_average, fairseq would start the average at weights that it has already deleted.
    """
    extra, cfg = state.get("extra_state"), RUN.cfg
    if cfg is not None and cfg.ema.store_ema and isinstance(extra, dict):
        extra.setdefault("ema", dict(state["model"]))
