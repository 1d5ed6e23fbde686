"""meta, to-meta: a checkpoint of Meta's moe branch of fairseq as one of ours, and ours as one of Meta's.

Meta's is several files: X-shared.pt, and X-rank-N.pt with rank N's experts. What both call the same things
is in meta_names. Weights and moments stay as they are, bit for bit. E experts, W ranks.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fairseq_tutel.tools.arguments import add_files, output_path, refuse_output
from fairseq_tutel.convert import meta_names, optimizer_state
from fairseq_tutel.checkpoint.reading import load, write, write_all
from fairseq_tutel.convert.meta_names import GATE, OUR_FC1, OUR_GATE, STOCK, Row, numbers
from fairseq_tutel.convert.optimizer_state import SHARED, InexactError, State
from fairseq_tutel.convert.names import (
    OPTIMIZERS,
    RUN_OPTIONS,
    drop,
    model_options,
    name_of,
    options_of,
    rename,
    rename_to_ours,
    rename_to_stock,
)
from fairseq_tutel.zero.state import MASTER

OPTIMIZER = "last_optimizer_state"
# What sharded data parallel puts before a name, and what it makes of weights that it flattens.
WRAPPERS, FLAT = r"(_fsdp_wrapped_module|_fpw_module)\.", r"(^|\.)flat_param"
# Stock fairseq's classes of averages in a log; another's state cannot be opened.
METERS = ("AverageMeter", "ConcatTensorMeter", "StopwatchMeter", "SumMeter", "TimeMeter")


def add_to(kinds: Any) -> None:
    """Add both directions to the command line."""
    parser = kinds.add_parser(
        "meta",
        help="from Meta's moe branch of fairseq",
        description="Write a checkpoint of Meta's moe branch of fairseq, of a transformer_lm… or "
        "transformer…, as one of ours that computes the same. Weights and moments stay, bit for bit.",
    )
    files = "checkpoint_best-shared.pt and checkpoint_best-rank-0.pt, …"
    add_files(parser, f"checkpoint_best.pt or checkpoint_best, for {files}")
    parser.set_defaults(convert=convert_from)
    parser = kinds.add_parser(
        "to-meta",
        help="to Meta's moe branch of fairseq",
        description="Write a checkpoint of ours, with a linear gate, top-1 or top-2 and ffn experts, as "
        "one of Meta's moe branch of fairseq. Weights and moments stay, bit for bit.",
    )
    add_files(parser, "a checkpoint of ours", f"checkpoint_best for {files}", "PREFIX")
    ranks = "ranks that Meta's branch is to run on: a divisor or a multiple of the experts"
    parser.add_argument("--ranks", required=True, type=int, metavar="N", help=ranks)
    parser.set_defaults(convert=convert_to)


@dataclass(frozen=True)
class Files:
    """Meta's files: those of the ranks in order and then the shared one, which so has the number SHARED."""

    paths: list[Path]
    states: list[State]

    def weight(self, row: Row) -> Tensor:
        """Return a weight of the table."""
        found: Tensor = self.states[row.file]["model"][row.theirs]
        return found


def path_of(prefix: Path, file: int) -> Path:
    """Return the path of a rank's file, or of that of SHARED."""
    return prefix.with_name(f"{prefix.name}-{'shared' if file == SHARED else f'rank-{file}'}.pt")


def prefix_of(name: str) -> Path:
    """Return X from it, from X.pt, or from the name of one of the files."""
    path = Path(name)
    return path.with_name(re.sub(r"-(shared|rank-\d+)$", "", path.name.removesuffix(".pt")))


def convert_from(arguments: argparse.Namespace) -> None:
    """Convert Meta's files that the command line names.

    Raises:
        ValueError: naming what is wrong and the fix.
    """
    output = output_path(arguments.output)
    files = opened(prefix_of(arguments.input))
    refuse_output(output, files.paths, arguments.overwrite)
    state, notes = ours_of(files)
    write(state, output)
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {output}")


def opened(prefix: Path) -> Files:
    """Open all files of a checkpoint; their tensors stay there until they are read.

    Raises:
        ValueError: a file is missing, torn, of another kind, or has flattened weights.
    """
    shared = load(path_of(prefix, SHARED), "--input")
    pattern = re.compile(re.escape(prefix.name) + r"-rank-(\d+)\.pt")
    found = [pattern.fullmatch(path.name) for path in prefix.parent.iterdir()]
    count = 1 + max((int(match[1]) for match in found if match), default=0)
    paths = [path_of(prefix, file) for file in (*range(count), SHARED)]
    states = [*(load(path, "--input") for path in paths[:-1]), shared]
    for path, state in zip(paths, states, strict=True):
        weights = {}
        for key, tensor in state["model"].items():
            name = re.sub(WRAPPERS, "", key.removeprefix("module."))
            if re.search(FLAT, name):
                raise ValueError(
                    f"--input names {path}, which holds flattened weights ({key}) of a sharded training; "
                    "save it from Meta's branch without --use-sharded-state."
                )
            weights[name] = tensor
        state["model"] = weights
    return Files(paths, states)


def ours_of(files: Files) -> tuple[State, list[str]]:
    """Return the files as one checkpoint of ours, and what has no counterpart, a sentence each.

    In memory is one copy of the experts, and of their moments; all else stays in its file.

    Raises:
        ValueError: a file or weight is missing, or the model has something that ours have not.
    """
    rows, experts, hidden_dims = _checked(files)
    sources: dict[str, list[Row]] = {}  # of each weight of ours: one, or every expert's
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
    state = dict(files.states[SHARED])
    rename_to_ours(state, "--input")
    state["model"] = {
        name: files.weight(own[0])
        if own[0].expert is None
        else torch.stack([files.weight(row) for row in own])
        for name, own in sources.items()
    }
    options = model_options(state)
    notes += meta_names.from_meta(options, experts, hidden_dims)
    _check_layers(options, state["model"])
    if "checkpoint_suffix" in (checkpoint := options_of(state, "checkpoint")):
        checkpoint["checkpoint_suffix"] = ""  # it was -rank-N
    state.pop(OPTIMIZER, None)
    try:
        if (optimizer := name_of(state, "optimizer")) not in OPTIMIZERS:
            raise InexactError(f"--optimizer {optimizer} has no twin here")
        rename(state, "optimizer", f"moe_{optimizer}")
        state[OPTIMIZER] = _our_optimizer(files, rows, list(sources.values()))
        for entry in state.get("optimizer_history") or []:
            if entry.get("optimizer_name") in OPTIMIZERS.values():
                entry["optimizer_name"] = f"MoE{entry['optimizer_name']}"
    except InexactError as reason:
        notes.append(
            f"the optimizer state is left out ({reason}); start from the file by --finetune-from-model, "
            "or by --restore-file with --reset-optimizer."
        )
    return state, notes + _keep_training(state, len(files.paths) - 1)


def _checked(files: Files) -> tuple[list[Row], int, dict[str, int]]:
    """Return what should be in the files and is, E, and the hidden dimension of each side's experts.

    Raises:
        ValueError: a file or weight is missing, has another shape, or is not known here.
    """

    def refuse(path: Path, what: str, fix: str = "give the files of one training") -> NoReturn:
        raise ValueError(f"--input names {path}, {what}; {fix}.")

    *ranks, shared = [state["model"] for state in files.states]
    gates = {name.removesuffix(GATE): t for name, t in shared.items() if name.endswith(GATE)}
    if not gates:
        what = f"which has no experts (no …{GATE})"
        refuse(files.paths[SHARED], what, "a dense checkpoint needs no conversion")
    if len({gate.shape[0] for gate in gates.values()}) > 1:
        what = "whose layers have different numbers of experts, which Meta's options cannot say"
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


def _check_layers(options: dict[str, Any], model: dict[str, Tensor]) -> None:
    """Refuse weights whose layers are not those that the options say."""
    for side in {name.split(".")[0] for name in model}:
        freq = options.get(f"{side}_moe_freq", options["moe_freq"])
        layers = {name.split(".")[2] for name in model if name.startswith(f"{side}.layers.")}
        expected = [i for i in range(len(layers)) if freq and (i + 1) % freq == 0]
        found = [i for i in range(len(layers)) if f"{side}.layers.{i}{OUR_GATE}" in model]
        if found != expected:
            raise ValueError(
                f"--input has experts in the {side} layers {found}, but its options say {expected} "
                f"(--moe-freq {freq}); give the files of one training."
            )


def _our_optimizer(files: Files, rows: list[Row], sources: list[list[Row]]) -> State:
    """Return the ranks' states as one of our model.

    Raises:
        InexactError: they cannot be one without a change.
    """
    saved = [state.get(OPTIMIZER) or {} for state in files.states]
    if not all(isinstance(part, dict) and "state" in part for part in saved):
        raise InexactError("it is not in all files")
    number = numbers(rows, files.states[SHARED]["model"])
    group = optimizer_state.one_group(saved[SHARED], len(number))
    moments, ours = {}, [own for own in sources if own[0].theirs in number]
    for i, own in enumerate(ours):
        states = [saved[row.file]["state"].get(number[row.theirs], {}) for row in own]
        shape = files.weight(own[0]).shape
        if own[0].expert is None:
            found = optimizer_state.checked(states[0], shape)
        else:
            found = optimizer_state.stacked(states, shape)
        moments.update({i: found} if found else {})
    # The first rank's has the loss scale, too, of a training in fp16.
    groups = [{**group, "params": list(range(len(ours)))}]
    return {**saved[0], "state": moments, "param_groups": groups}


def _keep_training(state: State, ranks: int) -> list[str]:
    """Keep the place in the data and the averages of the log as far as they can be read here."""
    extra = state["extra_state"] = dict(state.get("extra_state") or {})
    iterator = extra.get("train_iterator")
    if isinstance(iterator, dict):
        # Ours says where all ranks are together, so that any number of them can go on.
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


def convert_to(arguments: argparse.Namespace) -> None:
    """Convert our file that the command line names.

    Raises:
        ValueError: naming what is wrong and the fix.
    """
    source, ranks = Path(arguments.input), arguments.ranks
    prefix = prefix_of(str(output_path(arguments.output)))
    state = load(source, "--input")
    ends = (OUR_GATE, OUR_FC1)
    counts = {t.shape[0] for name, t in state["model"].items() if name.endswith(ends)}
    if len(counts) != 1:
        raise ValueError(
            f"--input has layers with {sorted(counts) or 'no'} experts, and Meta's branch has one number "
            "for all; give a checkpoint of such a model."
        )
    (experts,) = counts
    if ranks < 1 or (experts % ranks and ranks % experts):
        raise ValueError(
            f"--ranks is {ranks}, but the model has {experts} experts; give a divisor of it, or a multiple."
        )
    outputs = [path_of(prefix, file) for file in range(SHARED, ranks)]
    for path in outputs:
        refuse_output(path, [source], arguments.overwrite)
    notes = _translate(state, ranks)
    write_all(_files_of(state, prefix, experts, ranks, notes))
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {outputs[0]} and {ranks} files of ranks")


def _translate(state: State, ranks: int) -> list[str]:
    """Give names and options Meta's form, in place; return what has no counterpart there.

    Raises:
        ValueError: Meta's model cannot compute the same.
    """
    rename_to_stock(state)
    rename(state, "optimizer", name_of(state, "optimizer").removeprefix("moe_"))
    weights = state["model"].items()
    dims = {name.split(".")[0]: t.shape[1] for name, t in weights if name.endswith(OUR_FC1)}
    notes = meta_names.to_meta(model_options(state), dims)
    # How experts are computed and logged here: Meta's task refuses options that it does not know.
    drop(state, RUN_OPTIONS)
    if isinstance(task := (state.get("cfg") or {}).get("task"), dict):
        task.pop("record_a2a_perf_stats", None)  # Meta's model has this one, not its task
    for entry in state.get("optimizer_history") or []:
        name = str(entry.get("optimizer_name")).removeprefix("MoE")
        if name in OPTIMIZERS.values():
            entry["optimizer_name"] = name
    if "distributed_world_size" in (distributed := options_of(state, "distributed_training")):
        distributed["distributed_world_size"] = ranks
    iterator = (state.get("extra_state") or {}).get("train_iterator")
    if isinstance(iterator, dict) and "global_batches" in iterator:
        # The place in the data in batches of a rank, as stock fairseq says it.
        done = iterator.pop("global_batches")
        iterator.pop("order_shards", None)
        iterator["iterations_in_epoch"] = done // ranks
        if done % ranks:
            notes.append(
                f"the place in the epoch, {done} batches, is none of {ranks} ranks: a training goes on "
                f"from {done // ranks * ranks}."
            )
    return notes


def _files_of(
    state: State, prefix: Path, experts: int, ranks: int, notes: list[str]
) -> Iterator[tuple[Path, State]]:
    """Yield every file of a state whose names and options are Meta's; one rank's experts are in memory.

    What is left out is added to the notes.

    Raises:
        ValueError: a MoE layer has weights that Meta's has not, or lacks some.
    """
    model, saved = state["model"], state.pop(OPTIMIZER, None)
    rows = meta_names.table(model, experts, ranks)
    if differing := {row.ours for row in rows} ^ model.keys():
        raise ValueError(
            f"--input has {', '.join(sorted(differing))} more or less than a gate and four tensors of "
            "experts, as Meta's layers have; give such a model."
        )
    number = numbers(rows, {row.theirs: model[row.ours] for row in rows if row.file == SHARED})
    trains = {row.ours for row in rows if row.theirs in number}
    ours = [name for name in model if name in trains]
    group, moments_of = {}, {}
    try:
        if not isinstance(saved, dict) or "state" not in saved:
            raise InexactError("there is none")
        group = {**optimizer_state.one_group(saved, len(ours)), "params": list(range(len(number)))}
        moments_of = {name: saved["state"].get(i, {}) for i, name in enumerate(ours)}
    except InexactError as reason:
        saved = None
        notes.append(f"the optimizer state is left out ({reason}).")
    for file in (*range(ranks), SHARED):
        weights: dict[str, Tensor] = {}
        moments: dict[int, State] = {}
        for row in rows:
            if row.file != file:
                continue
            tensor, expert = model[row.ours], row.expert
            weights[row.theirs] = tensor if expert is None else tensor[expert].clone()
            # Meta's files have the half weights alone.
            own = {k: v for k, v in moments_of.get(row.ours, {}).items() if k != MASTER}
            if own:
                own = own if expert is None else optimizer_state.apart(own, expert, tensor.shape)
                moments[number[row.theirs]] = own
        part = {**state, "model": weights}
        if saved:
            part[OPTIMIZER] = {**saved, "state": moments, "param_groups": [group]}
        yield path_of(prefix, file), part
