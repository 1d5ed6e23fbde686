"""Loads checkpoint files: refuses damaged and foreign ones, runs no code in them, opens their shards."""

import argparse
import functools
import logging
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.dataclass.utils import convert_namespace_to_omegaconf, gen_parser_from_dataclass
from fairseq.utils import import_user_module
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fairseq_tutel.checkpoint.files import IS_CORRUPT, is_whole, refused_class, unlike_a_file
from fairseq_tutel.checkpoint.malformed import refuse_malformed
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind
from fairseq_tutel.moe.config import label_of
from fairseq_tutel.moe.option_table import options_of
from fairseq_tutel.options.option import is_custom
from fairseq_tutel.plugin.opening.literals import options_within, refuse_code, refuse_unusable_options
from fairseq_tutel.plugin.registration.flags import (
    SystemOptions,
    has_user_dir,
    refuse_misspelt,
    warn_of_given,
)
from fairseq_tutel.plugin.registration.process import is_machine_error
from fairseq_tutel.plugin.run_state import OPENED, RUN
from fairseq_tutel.ranks import world

logger = logging.getLogger(__name__)

# With this environment variable damaged files are opened.
OPEN_DAMAGED = "FAIRSEQ_TUTEL_OPEN_DAMAGED"
# Errors that fairseq and torch raise for a file with other content; see `is_machine_error`.
FOREIGN_FILE_ERRORS = (
    LookupError, TypeError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError,
    OmegaConfBaseException,
)  # fmt: skip


def load_checkpoint_to_cpu(original: Any) -> Any:
    """Wrap fairseq's function: refuse damaged and foreign files; leave experts in shard files unread."""

    @functools.wraps(original)
    def wrapper(path: str, arg_overrides: Any = None, load_on_all_ranks: Any = None) -> Any:
        overrides = arg_overrides or {}
        refuse_misspelt(overrides)
        # Only the Trainer gives this argument. Its file was checked before, and the command line has the
        # options.
        is_for_use = load_on_all_ranks is None
        kind = unlike_a_file(path)
        if kind is not None:
            raise ValueError(f"{path} is {kind}, not a checkpoint; give a file.")
        try:
            if is_for_use:
                _refuse_damaged(path)
            state = original(path, arg_overrides, bool(load_on_all_ranks))
            # Values of the run's own configuration may also be in its checkpoint.
            given = overrides if is_for_use else {**dict(options_within(RUN.cfg)), **overrides}
            refuse_code(state, path, given)
            refuse_malformed(state, path)
            if is_for_use:
                _prepare_for_use(state, path, overrides)
            bind(state, Path(path))
            if not is_for_use:
                _warn_of_quantized(state, path)
        except FOREIGN_FILE_ERRORS as error:
            if is_machine_error(error):
                raise
            raise _foreign_file(path, error) from error
        return state

    return wrapper


def _prepare_for_use(state: Any, path: str, overrides: Mapping[str, Any]) -> None:
    """Check the options of a checkpoint that is opened for use, and update them in place."""
    _refuse_unknown_classes(state, path, overrides)
    if mark_as_opened(state):
        refuse_code(state, path, overrides)  # the conversion parsed their text
    refuse_unusable_options(state, path)
    _update_task(state, overrides)
    _warn_of_dense_model(path, state)


def _refuse_damaged(path: str) -> None:
    """Refuse a local file that differs from what was saved: its weights cannot be trusted."""
    if os.path.isfile(path) and not os.environ.get(OPEN_DAMAGED) and not is_whole(path):
        raise ValueError(
            f"{path} is not a checkpoint, or one that {IS_CORRUPT}; give another file, or set "
            f"{OPEN_DAMAGED}=1 to use it as it is."
        )


def _foreign_file(path: str, error: BaseException) -> ValueError:
    """Return an error that explains why fairseq could not read a file."""
    refused = refused_class(error)
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    holds = f"it holds {refused}, which is not run" if refused else reason
    return ValueError(f"{path} is not a checkpoint that fairseq saved ({holds}); give one that it did.")


def mark_as_opened(state: Any) -> bool:
    """Mark the configuration of a checkpoint that is opened for use, in place, for `is_opened`.

    Return whether an older file's command line was converted to a configuration, which fairseq does later.
    """
    is_older = state.get("args") is not None
    if is_older:
        state["cfg"], state["args"] = convert_namespace_to_omegaconf(state["args"]), None
    if OmegaConf.is_config(state.get("cfg")):
        state["cfg"]._set_flag(OPENED, True)  # its children inherit it
    model = (state.get("cfg") or {}).get("model")
    if isinstance(model, argparse.Namespace):
        setattr(model, OPENED, True)
    return is_older


def _refuse_unknown_classes(state: Any, path: str, overrides: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose options would import a module that the user did not name."""
    models = [state.get("args"), (state.get("cfg") or {}).get("model")]
    for field in ("gate_type", "expert_type"):
        key = f"moe_{field}"
        for value in [str(getattr(model, key, "")) for model in models if key not in overrides]:
            unknown = [n for n in map(str.strip, value.split(",")) if is_custom(n) and not _is_imported(n)]
            if unknown:
                raise ValueError(
                    f"{path} has the {label_of(field)} {unknown[0]}, and a checkpoint must not import "
                    "modules; if you trust it, import it in --user-dir, or add "
                    f"--model-overrides \"{{'{key}': '{value}'}}\"."
                )


def _is_imported(name: str) -> bool:
    """Whether a class's module is imported already, or is in the --user-dir."""
    module = name.rpartition(".")[0]
    package = sys.modules.get(module.partition(".")[0])
    user_dirs: set[str] = getattr(import_user_module, "memo", set())
    return module in sys.modules or not user_dirs.isdisjoint(getattr(package, "__path__", ()))


def _update_task(state: Any, overrides: Mapping[str, Any]) -> None:
    """Replace torch's grouped_mm, a retired backend, by auto, and add system options that the file lacks.

    fairseq overrides options only if the file has them.
    """
    task: Any = (state.get("cfg") or {}).get("task")
    values = vars(task) if isinstance(task, argparse.Namespace) else task
    if values and str(values.get("moe_backend", "")) == "grouped_mm":
        values["moe_backend"] = "auto"
    if OmegaConf.is_config(task):
        known = {option.key for option in options_of("task")}
        with open_dict(task):
            task.update({k: v for k, v in overrides.items() if k in known})


def _warn_of_quantized(state: Any, path: str) -> None:
    """Warn if training resumes from quantized experts."""
    tensors = (state.get("model") or {}).values()
    packings = {t.expert_dtype for t in tensors if isinstance(t, ShardedTensor) and t.expert_dtype}
    if packings:
        logger.warning(
            "%s has experts in %s: training continues from these rounded weights; resume from the "
            "checkpoint that it was converted from to continue from the exact ones.",
            *(path, ", ".join(sorted(packings))),
        )


def _warn_of_dense_model(path: str, state: Any) -> None:
    """Warn of system options on a command line that opens a dense checkpoint.

    fairseq's tasks call no hook of the plugin for dense models, so the command line is parsed here.
    """
    is_used_by_training = RUN.cfg is not None and RUN.cfg.common_eval.path is None
    has_experts = any(".experts." in name for name in state.get("model") or ())
    if has_experts or is_used_by_training or not has_user_dir(sys.argv):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    gen_parser_from_dataclass(parser, SystemOptions())
    if world.is_first():
        warn_of_given(parser.parse_known_args(sys.argv[1:])[0], path)
