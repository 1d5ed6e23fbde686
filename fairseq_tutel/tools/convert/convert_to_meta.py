"""to-meta: write a checkpoint of ours as one of Meta's moe branch of fairseq.

Language models and encoder-decoders whose layers Meta's can compute: linear gate, top-1 or top-2, ffn
experts. Weights and moments stay as they are, bit for bit.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.tools.arguments import add_overwrite, output_path, refuse_output
from fairseq_tutel.tools.convert.fairseq_names import OPTIMIZERS, TASKS, has_twin
from fairseq_tutel.tools.convert.files import load, write_all
from fairseq_tutel.tools.convert.meta_files import prefix_of, rank_path, shared_path
from fairseq_tutel.tools.convert.meta_options import to_meta
from fairseq_tutel.tools.convert.meta_weights import (
    TENSORS,
    meta_expert,
    meta_gate,
    our_experts,
    our_gate,
)
from fairseq_tutel.tools.convert.optimizer_state import (
    InexactError,
    apart,
    one_group,
    trained,
)
from fairseq_tutel.tools.convert.options import model_options, name_of, options_of, rename
from fairseq_tutel.tools.convert.our_options import RUN_OPTIONS
from fairseq_tutel.zero.state import MASTER

LAYER = re.compile(r"(.+)\.fc1\.gate\.weight")
OPTIMIZER = "last_optimizer_state"
# Meta's name of a tensor -> (our name, number of the expert; none where it is no expert's).
Names = dict[str, tuple[str, int | None]]


def add_to(kinds: Any) -> None:
    """Add this conversion to the command line."""
    parser = kinds.add_parser(
        "to-meta", help="to Meta's moe branch of fairseq", description=__doc__
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="a checkpoint of ours")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PREFIX",
        help="checkpoint_best for checkpoint_best-shared.pt and checkpoint_best-rank-0.pt, …",
    )
    parser.add_argument(
        "--ranks",
        required=True,
        type=int,
        metavar="N",
        help="ranks that Meta's branch is to run on: a divisor or a multiple of the experts",
    )
    add_overwrite(parser)
    parser.set_defaults(convert=convert)


def convert(arguments: argparse.Namespace) -> None:
    """Convert what the command line names.

    Raises:
        ValueError: naming what is wrong and the fix.
    """
    source, ranks = Path(arguments.input), arguments.ranks
    prefix = prefix_of(str(output_path(arguments.output)))
    state = load(source, "--input")
    experts = number_of_experts(state["model"])
    if ranks < 1 or (experts % ranks and ranks % experts):
        raise ValueError(
            f"--ranks is {ranks}, but the model has {experts} experts; give a divisor of it, or a multiple."
        )
    outputs = [shared_path(prefix), *(rank_path(prefix, rank) for rank in range(ranks))]
    for path in outputs:
        refuse_output(path, [source], arguments.overwrite)
    notes = translate(state, ranks)
    write_all(converted(state, prefix, ranks, notes))
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {outputs[0]} and {ranks} files of ranks")


def number_of_experts(model: dict[str, Tensor]) -> int:
    """Return E of all layers, their gates' and their experts'.

    Raises:
        ValueError: there are none, or they differ.
    """
    counts = {
        tensor.shape[0]
        for name, tensor in model.items()
        if name.endswith((our_experts("", "fc1.weight"), our_gate("")))
    }
    if len(counts) != 1:
        raise ValueError(
            f"--input has layers with {sorted(counts) or 'no'} experts, and Meta's branch has one number "
            "for all; give a checkpoint of such a model."
        )
    return counts.pop()


def translate(state: dict[str, Any], ranks: int) -> list[str]:
    """Give names and options Meta's form, in place; return what has no counterpart there.

    Raises:
        ValueError: Meta's model cannot compute the same.
    """
    arch = name_of(state, "model").removeprefix("moe_")
    if not has_twin(arch):
        raise ValueError(
            f"--input has the architecture {arch or 'without a name'}, and Meta's branch has experts in "
            "transformer_lm… and transformer… alone; give a checkpoint of such a model."
        )
    dims = {
        name.split(".")[0]: tensor.shape[1]
        for name, tensor in state["model"].items()
        if name.endswith(our_experts("", "fc1.weight"))
    }
    notes = to_meta(model_options(state), dims)
    task, optimizer = name_of(state, "task"), name_of(state, "optimizer")
    stock = {ours: theirs for theirs, ours in reversed(TASKS.items())}
    rename(state, "model", arch)
    rename(state, "task", stock.get(task, task))
    rename(state, "optimizer", optimizer.removeprefix("moe_"))
    _drop_options_of_the_run(state)
    for entry in state.get("optimizer_history") or []:
        name = str(entry.get("optimizer_name")).removeprefix("MoE")
        if name in OPTIMIZERS.values():
            entry["optimizer_name"] = name
    notes += _keep_place(state, ranks)
    distributed = options_of(state, "distributed_training")
    if "distributed_world_size" in distributed:
        distributed["distributed_world_size"] = ranks
    return notes


def _drop_options_of_the_run(state: dict[str, Any]) -> None:
    """Take out what says how experts are computed and logged here; Meta's task refuses unknown options."""
    for part in ("task", "criterion", "model"):
        options = options_of(state, part)
        for key in RUN_OPTIONS:
            options.pop(key, None)
    task = (state.get("cfg") or {}).get("task")
    if isinstance(task, dict):  # Meta's model has this one, not its task
        task.pop("record_a2a_perf_stats", None)


def _keep_place(state: dict[str, Any], ranks: int) -> list[str]:
    """Say the place in the data in batches of a rank, as stock fairseq does."""
    iterator = (state.get("extra_state") or {}).get("train_iterator")
    if not isinstance(iterator, dict) or "global_batches" not in iterator:
        return []
    done = iterator.pop("global_batches")
    iterator.pop("order_shards", None)
    iterator["iterations_in_epoch"] = done // ranks
    if done % ranks == 0:
        return []
    return [
        f"the place in the epoch, {done} batches, is none of {ranks} ranks: a training goes on from "
        f"{done // ranks * ranks}."
    ]


def converted(
    state: dict[str, Any], prefix: Path, ranks: int, notes: list[str]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every file: the ranks' in order, then the shared one; one rank's experts are in memory.

    Args:
        state: ours, with names and options in Meta's form already.
        prefix: X.
        ranks: W.
        notes: what is left out is added to it.

    Raises:
        ValueError: the model has something that Meta's has not.
    """
    model = state["model"]
    experts = number_of_experts(model)
    local = max(1, experts // ranks)
    names = meta_names(model, local)
    rest = {key: value for key, value in state.items() if key not in ("model", OPTIMIZER)}
    try:
        saved = _Optimizer(state.get(OPTIMIZER), model, names)
    except InexactError as reason:
        saved = None
        notes.append(f"the optimizer state is left out ({reason}).")
    for rank in range(ranks):
        own: Names = {
            name: (ours, (rank * local + i) % experts)
            for name, (ours, i) in names.items()
            if i is not None
        }
        weights = {name: model[ours][expert].clone() for name, (ours, expert) in own.items()}
        yield rank_path(prefix, rank), _file(rest, weights, saved, own)
    shared: Names = {name: (ours, None) for name, (ours, i) in names.items() if i is None}
    weights = {name: model[ours] for name, (ours, _) in shared.items()}
    yield shared_path(prefix), _file(rest, weights, saved, shared)


def _file(
    rest: dict[str, Any], weights: dict[str, Tensor], optimizer: "_Optimizer | None", names: Names
) -> dict[str, Any]:
    state = {**rest, "model": weights}
    return state if optimizer is None else {**state, OPTIMIZER: optimizer.part(names)}


def meta_names(model: dict[str, Tensor], local: int) -> Names:
    """Return Meta's names of a rank's weights, in the order of Meta's model, and where ours has each.

    Args:
        model: our weights.
        local: experts of a rank; they stand under their local numbers.

    Raises:
        ValueError: a MoE layer has weights that Meta's has not, or lacks some.
    """
    names: Names = {}
    for name in model:
        gate = LAYER.fullmatch(name)
        if gate is not None:
            layer = gate[1]
            own = {our_gate(layer), *(our_experts(layer, tensor) for tensor in TENSORS)}
            differing = own ^ {key for key in model if key.startswith(f"{layer}.fc1.")}
            if differing:
                raise ValueError(
                    f"--input has {layer}.fc1 with {', '.join(sorted(differing))} more or less "
                    "than a gate and four tensors of experts, as Meta's layer has; give such a model."
                )
            names[meta_gate(layer)] = (name, None)
            for i in range(local):
                for tensor in TENSORS:
                    names[meta_expert(layer, i, tensor)] = (our_experts(layer, tensor), i)
        elif ".fc1.experts." not in name:
            names[name] = (name, None)
    return names


class _Optimizer:
    """Our optimizer state, handed out in Meta's numbering.

    Args:
        state: ours.
        model: our weights.
        names: of the weights of Meta's model.

    Raises:
        InexactError: it is not by parameter.
    """

    def __init__(self, state: Any, model: dict[str, Tensor], names: Names) -> None:
        if not isinstance(state, dict) or "state" not in state:
            raise InexactError("there is none")
        ours = trained(list(model), model.__getitem__)
        theirs = trained(list(names), lambda name: model[names[name][0]])
        self.group = {**one_group(state, len(ours)), "params": list(range(len(theirs)))}
        self.rest = {
            key: value for key, value in state.items() if key not in ("state", "param_groups")
        }
        self.number = {name: i for i, name in enumerate(theirs)}
        self.state = {name: state["state"].get(i, {}) for i, name in enumerate(ours)}
        self.model = model

    def part(self, names: Names) -> dict[str, Any]:
        """Return the state of some parameters, as one of Meta's files has it."""
        moments = {}
        for name, (ours, expert) in names.items():
            # Meta's files have the half weights alone.
            found = {k: v for k, v in self.state.get(ours, {}).items() if k != MASTER}
            if found and expert is not None:
                found = apart(found, expert, self.model[ours].shape)
            if found:
                moments[self.number[name]] = found
        return {**self.rest, "state": moments, "param_groups": [self.group]}
