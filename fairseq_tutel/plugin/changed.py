"""What a checkpoint was trained with and this run is not: said, since it changes what is computed."""

import argparse
import logging
import pickle
import zipfile
from typing import Any

import torch

from fairseq_tutel.plugin.flags import EncoderDecoderOptions, defaults
from fairseq_tutel.ranks import groups

logger = logging.getLogger(__name__)


def say_what_changed(path: str | None, cfg: Any) -> None:
    """Log the experts' options that differ between a checkpoint's model and this one's.

    Args:
        path: of the checkpoint that training will go on from; None for none.
        cfg: the configuration of the model that is built.
    """
    if path is None or groups.in_use().rank > 0 or not zipfile.is_zipfile(path):
        return
    try:  # mapped, not read: tensors stay on disk
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        return  # the load itself will refuse it, on every rank
    saved = (state.get("cfg") or {}).get("model")
    # A dictionary, or what was on the command line.
    saved = saved if isinstance(saved, dict) else vars(saved or argparse.Namespace())
    if "moe_freq" not in saved:
        return
    changed = []
    for key, default in defaults(EncoderDecoderOptions).items():
        before, now = _plain(saved.get(key, default)), _plain(getattr(cfg, key, default))
        if before != now:
            changed.append(f"--{key.replace('_', '-')} {before} (now {now})")
    if changed:
        logger.warning("the checkpoint was trained with %s", ", ".join(changed))


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))
