"""Converts a checkpoint of Meta's moe branch of fairseq.

Meta writes X-shared.pt and a file X-rank-N.pt with the experts of each rank. Weights and moments keep their
bits. `meta_names` has the tables of names and options. E experts, W ranks.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert import meta_names, meta_optimizer
from fairseq_tutel.convert.meta_names import GATE, OUR_GATE, SHARED, STOCK, Row
from fairseq_tutel.convert.meta_optimizer import InexactError, State
from fairseq_tutel.convert.names import OPTIMIZERS, use_moe_names

OPTIMIZER = "last_optimizer_state"
# Prefixes that sharded data parallel adds to names, and its name of flattened weights.
WRAPPERS, FLAT = r"(_fsdp_wrapped_module|_fpw_module)\.", r"(^|\.)flat_param"
# fairseq's classes of averages in a log; states of other classes cannot be opened.
METERS = ("AverageMeter", "ConcatTensorMeter", "StopwatchMeter", "SumMeter", "TimeMeter")


@dataclass(frozen=True)
class MetaFiles:
    """Meta's files: those of the ranks in order, then the shared one, whose index is SHARED."""

    paths: list[Path]
    states: list[State]

    def weight(self, row: Row) -> Tensor:
        """Return a weight of the table."""
        found: Tensor = self.states[row.file]["model"][row.theirs]
        return found


def path_of(prefix: Path, file: int) -> Path:
    """Return the path of a rank's file, or of the shared one."""
    return prefix.with_name(f"{prefix.name}-{'shared' if file == SHARED else f'rank-{file}'}.pt")


def prefix_of(name: str) -> Path:
    """Return X for X, X.pt or the name of one of the files."""
    path = Path(name)
    return path.with_name(re.sub(r"-(shared|rank-\d+)$", "", path.name.removesuffix(".pt")))


def open_meta(prefix: Path) -> MetaFiles:
    """Open all files of a checkpoint; their tensors are mapped.

    Raises:
        ValueError: a file is missing, corrupt or of another kind, or has flattened weights.
    """
    shared = SavedModel.open(path_of(prefix, SHARED)).state
    pattern = re.compile(re.escape(prefix.name) + r"-rank-(\d+)\.pt")
    found = [pattern.fullmatch(path.name) for path in prefix.parent.iterdir()]
    count = 1 + max((int(match[1]) for match in found if match), default=0)
    paths = [path_of(prefix, file) for file in (*range(count), SHARED)]
    states = [*(SavedModel.open(path).state for path in paths[:-1]), shared]
    for path, state in zip(paths, states, strict=True):
        weights = {}
        for key, tensor in state["model"].items():
            name = re.sub(WRAPPERS, "", key.removeprefix("module."))
            if re.search(FLAT, name):
                raise ValueError(
                    f"--input names {path}, which holds flattened weights ({key}) of a sharded training "
                    "run; save it from Meta's branch without --use-sharded-state."
                )
            weights[name] = tensor
        state["model"] = weights
    return MetaFiles(paths, states)


def from_meta(files: MetaFiles) -> tuple[SavedModel, list[str]]:
    """Return the files as one checkpoint, and a sentence for each thing without a counterpart.

    Experts and their moments are copied to memory once. All else stays mapped.

    Raises:
        ValueError: a file or weight is missing, or the model has no equal here.
    """
    rows, experts, hidden_dims = _checked(files)
    sources: dict[str, list[Row]] = {}  # for each of our weights: one row, or one per expert
    notes: list[str] = []
    for row in rows:
        own, expert = sources.setdefault(row.ours, []), row.expert or 0
        if expert == len(own):
            own.append(row)
        elif not notes and not torch.equal(files.weight(row), files.weight(own[expert])):
            notes.append(
                f"{files.paths[row.file]} and {files.paths[own[expert].file]} hold one expert with "
                f"different weights ({row.theirs}); those of the second are taken."
            )
    saved = SavedModel(dict(files.states[SHARED]))
    use_moe_names(saved)
    saved.state["model"] = {
        name: files.weight(own[0])
        if own[0].expert is None
        else torch.stack([files.weight(row) for row in own])
        for name, own in sources.items()
    }
    notes += meta_names.from_meta(saved.options, experts, hidden_dims)
    _check_layers(saved)
    if "checkpoint_suffix" in (checkpoint := saved.options_of("checkpoint")):
        checkpoint["checkpoint_suffix"] = ""  # it was -rank-N
    saved.state.pop(OPTIMIZER, None)
    try:
        if (optimizer := saved.name("optimizer")) not in OPTIMIZERS:
            raise InexactError(f"--optimizer {optimizer} has no MoE variant")
        saved.rename("optimizer", f"moe_{optimizer}")
        saved.state[OPTIMIZER] = _optimizer_state(files, rows, list(sources.values()))
        for entry in saved.state.get("optimizer_history") or []:
            if entry.get("optimizer_name") in OPTIMIZERS.values():
                entry["optimizer_name"] = f"MoE{entry['optimizer_name']}"
    except InexactError as reason:
        notes.append(
            f"the optimizer state is left out ({reason}); start from the file by --finetune-from-model, "
            "or by --restore-file with --reset-optimizer."
        )
    return saved, notes + _keep_position(saved.state, len(files.paths) - 1)


def _checked(files: MetaFiles) -> tuple[list[Row], int, dict[str, int]]:
    """Compare the files with the table; return it, E, and the hidden dimension of each side's experts.

    Raises:
        ValueError: a file or weight is missing, has another shape, or is unknown.
    """

    def refuse(path: Path, what: str, fix: str = "give the files of one training run") -> NoReturn:
        raise ValueError(f"--input names {path}, {what}; {fix}.")

    *ranks, shared = [state["model"] for state in files.states]
    gates = {name.removesuffix(GATE): t for name, t in shared.items() if name.endswith(GATE)}
    if not gates:
        what = f"which has no experts (no …{GATE})"
        refuse(files.paths[SHARED], what, "a dense checkpoint needs no conversion")
    if len({gate.shape[0] for gate in gates.values()}) > 1:
        what = "whose layers have different numbers of experts, which Meta's options cannot express"
        refuse(files.paths[SHARED], what)
    layer, experts = next((layer, gate.shape[0]) for layer, gate in gates.items())
    found = (re.search(r"\.moe_layer\.experts\.(\d+)\.", name) for rank in ranks for name in rank)
    local = len({match[1] for match in found if match})
    if (held := local * len(ranks)) < experts or held % experts:
        missing = path_of(prefix_of(str(files.paths[0])), len(ranks))
        what = f"which does not exist: {layer} has {experts} experts, {local} in each file"
        refuse(missing, what, "give all of them")
    if local > 1 and held > experts:
        refuse(files.paths[-2], f"which makes {held} experts of {layer}, not {experts}")
    rows = meta_names.table(shared, experts, len(ranks))
    hidden_dims: dict[str, int] = {}
    for row in rows:
        path, weights = files.paths[row.file], files.states[row.file]["model"]
        if row.theirs not in weights:
            refuse(path, f"which lacks {row.theirs}")
        if row.expert is not None:
            layer, _, own = row.ours.partition(".fc1.experts.")
            shape, dim = tuple(weights[row.theirs].shape), gates[layer].shape[1]
            hidden = hidden_dims.setdefault(layer.partition(".")[0], shape[0])
            whole = (hidden, dim) if own.startswith("fc1") else (dim, hidden)
            expected = whole if own.endswith("weight") else whole[:1]
            if shape != expected:
                refuse(path, f"whose {row.theirs} has the shape {shape} and not {expected}")
    known = {(row.file, row.theirs) for row in rows}
    for file in range(SHARED, len(ranks)):
        for name in files.states[file]["model"]:
            if (file, name) not in known or (file == SHARED and not STOCK.fullmatch(name)):
                what = f"which has the weight {name}, that no model here has"
                refuse(files.paths[file], what, "convert a checkpoint without it")
    return rows, experts, hidden_dims


def _check_layers(saved: SavedModel) -> None:
    """Refuse weights whose MoE layers differ from those of the options."""
    weights, options = saved.weights, saved.options
    for side in {name.split(".")[0] for name in weights}:
        freq = options.get(f"{side}_moe_freq", options["moe_freq"])
        layers = {name.split(".")[2] for name in weights if name.startswith(f"{side}.layers.")}
        expected = [i for i in range(len(layers)) if freq and (i + 1) % freq == 0]
        found = [i for i in range(len(layers)) if f"{side}.layers.{i}{OUR_GATE}" in weights]
        if found != expected:
            raise ValueError(
                f"--input has experts in the {side} layers {found}, but its options say {expected} "
                f"(--moe-freq {freq}); give the files of one training run."
            )


def _optimizer_state(files: MetaFiles, rows: list[Row], sources: list[list[Row]]) -> State:
    """Return the ranks' optimizer states as one.

    Raises:
        InexactError: they cannot be joined without a change.
    """
    saved = [state.get(OPTIMIZER) or {} for state in files.states]
    if not all(isinstance(part, dict) and "state" in part for part in saved):
        raise InexactError("it is not in all files")
    # The parameters of one rank's model, by number in its optimizer.
    shared = files.states[SHARED]["model"]
    names = [row.theirs for row in rows if row.file in (0, SHARED)]
    trained = meta_optimizer.trained(names, shared.__getitem__)
    number = {name: i for i, name in enumerate(trained)}
    group = meta_optimizer.one_group(saved[SHARED], len(number))
    moments, ours = {}, [own for own in sources if own[0].theirs in number]
    for i, own in enumerate(ours):
        states = [saved[row.file]["state"].get(number[row.theirs], {}) for row in own]
        shape = files.weight(own[0]).shape
        if own[0].expert is None:
            found = meta_optimizer.checked(states[0], shape)
        else:
            found = meta_optimizer.stacked(states, shape)
        moments.update({i: found} if found else {})
    # The first rank's state also has the loss scale of fp16.
    groups = [{**group, "params": list(range(len(ours)))}]
    return {**saved[0], "state": moments, "param_groups": groups}


def _keep_position(state: State, ranks: int) -> list[str]:
    """Keep the data position and the averages of the log that can be opened; return notes."""
    extra: dict[str, Any] = dict(state.get("extra_state") or {})
    state["extra_state"] = extra
    iterator = extra.get("train_iterator")
    if isinstance(iterator, dict):
        # A position in global batches can be resumed with any number of ranks.
        done = iterator.get("iterations_in_epoch", 0) * ranks
        extra["train_iterator"] = {**iterator, "order_shards": ranks, "global_batches": done}
    if "metrics" in extra:
        extra["metrics"] = {
            name: [entry for entry in entries if entry[2] in METERS]
            for name, entries in extra["metrics"].items()
        }
    averages = [extra.pop(key, None) for key in ("ema", "ema_fp32_params")]
    note = "the moving average of the weights (--store-ema) is left out: it is one rank's."
    return [note] * any(average is not None for average in averages)
