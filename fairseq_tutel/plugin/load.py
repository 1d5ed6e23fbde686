"""A checkpoint's file that is opened: whole, fairseq's, and importing nothing of its own accord.

The functions that take an original wrap fairseq's; `wrapped` says why.
"""

import argparse
import functools
import logging
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.utils import import_user_module
from omegaconf import OmegaConf, open_dict

from fairseq_tutel.checkpoint.files import CORRUPT, is_whole, refused_class, unlike_a_file
from fairseq_tutel.checkpoint.malformed import refuse_malformed
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind
from fairseq_tutel.moe.config import label_of, options_of
from fairseq_tutel.moe.options import is_custom
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.flags import refuse_misspelt
from fairseq_tutel.plugin.literals import options_within, refuse_bad_references, refuse_code
from fairseq_tutel.plugin.opened_experts import refuse_without_pregating
from fairseq_tutel.plugin.resume import checkpoint_to_load, mapped
from fairseq_tutel.plugin.run_config import mark_as_opened, root_of, say_what_has_no_effect_on
from fairseq_tutel.plugin.stock_errors import is_of_the_machine

logger = logging.getLogger(__name__)

# Set, it opens damaged files all the same.
OPEN_DAMAGED = "FAIRSEQ_TUTEL_OPEN_DAMAGED"
# Options that may name a class: keys, with the fields of MoEConfig.
OF_CLASSES = {"moe_gate_type": "gate_type", "moe_expert_type": "expert_type"}
# What stock fairseq and torch raise over a file that holds something else; see `is_of_the_machine`.
NOT_FAIRSEQS = (
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)


def refuse_no_file(path: str) -> None:
    """Refuse a folder, a TorchScript file, and a FIFO, device or socket, which may never end.

    Raises:
        ValueError: naming the path and the fix.
    """
    kind = unlike_a_file(path)
    if kind is not None:
        raise ValueError(f"{path} is {kind}, not a checkpoint; give a file.")


def refuse_torn(path: str) -> None:
    """Refuse a local file that is not bit for bit what was saved: its weights cannot be trusted.

    Raises:
        ValueError: naming the file and the fix.
    """
    if os.path.isfile(path) and not os.environ.get(OPEN_DAMAGED) and not is_whole(path):
        raise ValueError(
            f"{path} is no checkpoint, or one that {CORRUPT}; give another file, or set {OPEN_DAMAGED}=1 "
            "to use it as it is."
        )


def not_fairseqs(path: str, error: BaseException) -> ValueError:
    """Return an error that says why fairseq could make nothing of what a file holds."""
    refused = refused_class(error)
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    holds = f"it holds {refused}, which is not run" if refused else reason
    return ValueError(
        f"{path} is no checkpoint that fairseq saved ({holds}); give one that it did."
    )


def refuse_unknown_classes(state: Any, path: str, overrides: Mapping[str, Any] | None) -> None:
    """Refuse a checkpoint that would have a module imported which nobody asked for.

    Args:
        state: as fairseq gives it, with the overrides in it.
        path: of the file.
        overrides: of --model-overrides; what these name is the user's word.

    Raises:
        ValueError: naming the file, the class and the fix.
    """
    models = [state.get("args"), (state.get("cfg") or {}).get("model")]
    for key in [key for key in OF_CLASSES if key not in (overrides or {})]:
        for value in [str(getattr(model, key, "")) for model in models]:
            unknown = [
                n for n in map(str.strip, value.split(",")) if is_custom(n) and not _is_at_hand(n)
            ]
            if unknown:
                raise ValueError(
                    f"{path} has the {label_of(OF_CLASSES[key])} {unknown[0]}, and a file may not have a "
                    "module imported; if you trust it, import it in --user-dir, or add --model-overrides "
                    f"\"{{'{key}': '{value}'}}\"."
                )


def forget_retired(state: Any) -> None:
    """Let auto stand for torch's grouped_mm, a backend of older versions: it is no part of the model."""
    task = (state.get("cfg") or {}).get("task")
    # A dictionary, a configuration, or of older tasks the command line.
    values = vars(task) if isinstance(task, argparse.Namespace) else task
    if values and str(values.get("moe_backend", "")) == "grouped_mm":
        values["moe_backend"] = "auto"


def tell_of_rounded(state: Any, path: str) -> None:
    """Warn that a training goes on from experts that were stored in fewer bits."""
    tensors = (state.get("model") or {}).values()
    packings = {t.expert_dtype for t in tensors if isinstance(t, ShardedTensor) and t.expert_dtype}
    if packings:
        logger.warning(
            "%s keeps experts in %s: the training goes on from these rounded weights; resume from the "
            "checkpoint that it was made of to go on from where that was.",
            path,
            ", ".join(sorted(packings)),
        )


def refuse_store(path: str, overrides: Mapping[str, Any]) -> None:
    """Refuse --moe-expert-store pregated before any tensor of a model without --moe-pregate is read.

    Args:
        path: of the file.
        overrides: of --model-overrides; they lack the options of a task that a command makes itself.

    Raises:
        ValueError: naming the fix.
    """
    task = getattr(root_of(None), "task", None)
    policy = str(overrides.get("moe_expert_store", getattr(task, "moe_expert_store", "")))
    if policy != "pregated" or not os.path.isfile(path):
        return
    state = mapped(path)
    if any(".experts." in key for key in state["model"]):
        models: list[Any] = [overrides, (state.get("cfg") or {}).get("model"), state.get("args")]
        options = [
            model if isinstance(model, Mapping) else vars(model) for model in models if model
        ]
        refuse_without_pregating(policy, any(each.get("moe_pregate") for each in options))


def add_system_options(state: Any, overrides: Mapping[str, Any] | None) -> None:
    """Give a task the options of ours that an older file lacks: stock overrides what is there alone."""
    task: Any = (state.get("cfg") or {}).get("task")
    known = {option.key for option in options_of("task")}
    if OmegaConf.is_config(task):
        with open_dict(task):
            task.update({k: v for k, v in (overrides or {}).items() if k in known})


def _is_at_hand(name: str) -> bool:
    """Whether a class's module is imported already, or stands in the --user-dir."""
    module = name.rpartition(".")[0]
    package = sys.modules.get(module.partition(".")[0])
    user_dirs: set[str] = getattr(import_user_module, "memo", set())
    return module in sys.modules or not user_dirs.isdisjoint(getattr(package, "__path__", ()))


def load_checkpoint_to_cpu(original: Any) -> Any:
    """Refuse what is damaged or foreign; make what stands for experts in shard files readable.

    Each rank will read its own part of these.
    """

    @functools.wraps(original)
    def wrapper(path: str, arg_overrides: Any = None, load_on_all_ranks: Any = None) -> Any:
        refuse_misspelt(arg_overrides or {})
        # The Trainer alone says it: its file was checked before, and its options are the command line's.
        is_for_use = load_on_all_ranks is None
        refuse_no_file(path)
        if is_for_use:
            refuse_torn(path)
        try:
            if is_for_use:
                refuse_store(path, arg_overrides or {})
            state = original(path, arg_overrides, bool(load_on_all_ranks))
            # What a training was told itself, its checkpoint may say too.
            own = root_of(None) if not is_for_use else None
            given = {**dict(options_within(own)), **(arg_overrides or {})}
            refuse_code(state, path, given)
            refuse_malformed(state, path)
            if is_for_use:
                refuse_unknown_classes(state, path, arg_overrides)
                mark_as_opened(state)
                refuse_code(state, path, given)  # hydra has read the options of an older file anew
                refuse_bad_references(state, path)
                forget_retired(state)
                add_system_options(state, arg_overrides)
                say_what_has_no_effect_on(path, state)
            bind(state, Path(path))
            if not is_for_use:
                tell_of_rounded(state, path)
        except NOT_FAIRSEQS as error:
            if is_of_the_machine(error):
                raise
            raise not_fairseqs(path, error) from error
        return state

    return wrapper


def load_checkpoint(original: Any) -> Any:
    """Choose and check the file of a dense training; experts did so when they were built. Collective."""

    @functools.wraps(original)
    def wrapper(cfg: Any, trainer: Any, **passthrough_args: Any) -> Any:
        # With a suffix each rank has a file of its own.
        if not trainer.checkpoint_suffix and not moe_layers(trainer.get_model()):
            checkpoint_to_load(cfg)
        return original(cfg, trainer, **passthrough_args)

    return wrapper
