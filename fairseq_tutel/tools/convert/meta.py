"""meta: write a checkpoint of Meta's moe branch of fairseq as one of ours.

Language models (transformer_lm…) and encoder-decoders (transformer…). The weights and moments stay as
they are, bit for bit; the options become those that compute the same here.
"""

import argparse
from typing import Any

from torch import Tensor

from fairseq_tutel.tools.arguments import add_overwrite, output_path, refuse_output
from fairseq_tutel.tools.convert.fairseq_names import ENCODER_DECODERS, OPTIMIZERS, TASKS, has_twin
from fairseq_tutel.tools.convert.files import write
from fairseq_tutel.tools.convert.meta_files import MetaFiles, open_files
from fairseq_tutel.tools.convert.meta_options import from_meta
from fairseq_tutel.tools.convert.meta_weights import (
    differing_copies,
    gathered,
    model_of_first_rank,
    our_experts,
    our_gate,
    weight_sources,
)
from fairseq_tutel.tools.convert.optimizer_state import (
    SHARED,
    InexactError,
    Source,
    checked,
    one_group,
    stacked,
    trained,
)
from fairseq_tutel.tools.convert.options import model_options, name_of, options_of, rename

# Stock fairseq's classes of averages in a log; another's state cannot be opened.
METERS = ("AverageMeter", "ConcatTensorMeter", "StopwatchMeter", "SumMeter", "TimeMeter")


def add_to(kinds: Any) -> None:
    """Add this conversion to the command line."""
    parser = kinds.add_parser("meta", help="from Meta's moe branch of fairseq", description=__doc__)
    parser.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="checkpoint_best.pt or checkpoint_best, for checkpoint_best-shared.pt and "
        "checkpoint_best-rank-0.pt, …",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    add_overwrite(parser)
    parser.set_defaults(convert=convert)


def convert(arguments: argparse.Namespace) -> None:
    """Convert what the command line names.

    Raises:
        ValueError: naming what is wrong and the fix.
    """
    output = output_path(arguments.output)
    files = open_files(arguments.input)
    refuse_output(output, files.paths, arguments.overwrite)
    state, notes = converted(files)
    write(state, output)
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {output}")


def converted(files: MetaFiles) -> tuple[dict[str, Any], list[str]]:
    """Return the files as one checkpoint of ours, and what has no counterpart, a sentence each.

    In memory is one copy of the experts, and of their moments; all else stays in its file.

    Raises:
        ValueError: a file or weight is missing, or the model has something that ours have not.
    """
    sources = weight_sources(files)
    notes = differing_copies(files)
    state = dict(files.shared)
    _rename(state)
    state["model"] = {
        name: gathered(source, lambda file, key: files.state(file)["model"][key])
        for name, source in sources.items()
    }
    options = model_options(state)
    notes += from_meta(options, *_sizes(state["model"]))
    _check_layers(options, state["model"])
    if "checkpoint_suffix" in (checkpoint := options_of(state, "checkpoint")):
        checkpoint["checkpoint_suffix"] = ""  # it was -rank-N
    notes += _keep_optimizer(state, files, sources)
    notes += _keep_training(state, len(files.ranks))
    return state, notes


def _rename(state: dict[str, Any]) -> None:
    """Give architecture, task and optimizer our names."""
    arch = name_of(state, "model")
    if not has_twin(arch):
        raise ValueError(
            f"--input has the architecture {arch or 'without a name'}, which has no twin here; there are "
            f"transformer_lm…, {', '.join(ENCODER_DECODERS)}."
        )
    rename(state, "model", f"moe_{arch}")
    task, optimizer = name_of(state, "task"), name_of(state, "optimizer")
    rename(state, "task", TASKS.get(task, task))
    rename(state, "optimizer", f"moe_{optimizer}" if optimizer in OPTIMIZERS else optimizer)


def _sizes(model: dict[str, Tensor]) -> tuple[int, dict[str, int]]:
    """Return the number of experts, and the hidden dimension of each side's.

    Raises:
        ValueError: layers differ.
    """
    counts: set[int] = set()
    dims: dict[str, set[int]] = {}
    for name, tensor in model.items():
        if name.endswith(our_experts("", "fc1.weight")):
            counts.add(tensor.shape[0])
            dims.setdefault(name.split(".")[0], set()).add(tensor.shape[1])
    if any(len(values) > 1 for values in (counts, *dims.values())):
        raise ValueError(
            "--input has layers with experts of different numbers or sizes, which Meta's options cannot "
            "say; give the files of one training."
        )
    return counts.pop(), {side: values.pop() for side, values in dims.items()}


def _check_layers(options: dict[str, Any], model: dict[str, Tensor]) -> None:
    """Refuse weights whose layers are not those that the options say."""
    for side in {name.split(".")[0] for name in model}:
        freq = options.get(f"{side}_moe_freq", options["moe_freq"])
        layers = {name.split(".")[2] for name in model if name.startswith(f"{side}.layers.")}
        expected = [i for i in range(len(layers)) if freq and (i + 1) % freq == 0]
        found = [i for i in range(len(layers)) if our_gate(f"{side}.layers.{i}") in model]
        if found != expected:
            raise ValueError(
                f"--input has experts in the {side} layers {found}, but its options say {expected} "
                f"(--moe-freq {freq}); give the files of one training."
            )


def _keep_optimizer(
    state: dict[str, Any], files: MetaFiles, sources: dict[str, Source]
) -> list[str]:
    """Set the optimizer state, if it can be the same; else leave it out and say why."""
    state.pop("last_optimizer_state", None)
    optimizer = name_of(state, "optimizer")
    try:
        if optimizer.removeprefix("moe_") not in OPTIMIZERS:
            raise InexactError(f"--optimizer {optimizer} has no twin here")
        state["last_optimizer_state"] = _optimizer_state(files, sources)
    except InexactError as reason:
        return [
            f"the optimizer state is left out ({reason}); start from the file by --finetune-from-model, "
            "or by --restore-file with --reset-optimizer."
        ]
    for entry in state.get("optimizer_history") or []:
        if entry.get("optimizer_name") in OPTIMIZERS.values():
            entry["optimizer_name"] = f"MoE{entry['optimizer_name']}"
    return []


def _optimizer_state(files: MetaFiles, sources: dict[str, Source]) -> dict[str, Any]:
    """Return the ranks' states as one of our model.

    Raises:
        InexactError: they cannot be one without a change.
    """
    saved = {
        file: files.state(file).get("last_optimizer_state") or {}
        for file in range(SHARED, len(files.ranks))
    }
    if not all(isinstance(part, dict) and "state" in part for part in saved.values()):
        raise InexactError("it is not in all files")
    model = model_of_first_rank(files)
    number = {name: i for i, name in enumerate(trained(list(model), model.__getitem__))}
    group = one_group(saved[SHARED], len(number))
    moments, ours = {}, [name for name in sources if sources[name][0][1] in number]
    for i, name in enumerate(ours):
        source = sources[name]
        states = [saved[file]["state"].get(number[key], {}) for file, key in source]
        shape = model[source[0][1]].shape
        found = checked(states[0], shape) if source[0][0] == SHARED else stacked(states, shape)
        moments.update({i: found} if found else {})
    return {
        **saved[0],  # with the loss scale, of a training in fp16
        "state": moments,
        "param_groups": [{**group, "params": list(range(len(ours)))}],
    }


def _keep_training(state: dict[str, Any], ranks: int) -> list[str]:
    """Keep the place in the data and the averages of the log as far as they can be read here."""
    notes, extra = [], dict(state.get("extra_state") or {})
    iterator = extra.get("train_iterator")
    if isinstance(iterator, dict):
        done = iterator.get("iterations_in_epoch", 0)
        # Ours says where all ranks are together, so that any number of them can go on.
        place = {"order_shards": ranks, "global_batches": done * ranks}
        extra["train_iterator"] = {**iterator, **place}
    if any(extra.pop(key, None) is not None for key in ("ema", "ema_fp32_params")):
        notes.append(
            "the moving average of the weights (--store-ema) is left out: it is one rank's."
        )
    if "metrics" in extra:
        extra["metrics"] = {
            name: [entry for entry in entries if entry[2] in METERS]
            for name, entries in extra["metrics"].items()
        }
    state["extra_state"] = extra
    return notes
