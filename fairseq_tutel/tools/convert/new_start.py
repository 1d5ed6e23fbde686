"""A checkpoint with which a training begins anew, as by fairseq's --finetune-from-model."""

from collections.abc import Mapping
from typing import Any

# Where fairseq begins in the data, and how it says so.
PLACE = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}


def begun_anew(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without optimizer state, meters, and place in the data.

    The history of trainings stays, which fairseq asks for.
    """
    kept = {key: value for key, value in state.items() if key != "last_optimizer_state"}
    nothing = {
        "criterion_name": "",
        "optimizer_name": "",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    return {
        **kept,
        "optimizer_history": state.get("optimizer_history") or [nothing],
        "extra_state": {"train_iterator": dict(PLACE)},
    }
