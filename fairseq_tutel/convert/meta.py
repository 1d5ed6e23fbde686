"""Converts a checkpoint of Meta's moe branch of fairseq.

Meta writes X-shared.pt and a file X-rank-N.pt with the experts of each rank. Weights keep their bits.
`meta_names` has the tables of names and options. E experts, W ranks.
"""

import re
from pathlib import Path
from typing import NoReturn

import torch

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert import meta_names
from fairseq_tutel.convert.configs import Tensors, use_moe_variants
from fairseq_tutel.convert.meta_names import GATE, SHARED, STOCK, Row
from fairseq_tutel.plugin.feed_forward import chosen_layers

# Prefixes that sharded data parallel adds to names, and its name of flattened weights.
WRAPPERS, FLAT = r"(_fsdp_wrapped_module|_fpw_module)\.", r"(^|\.)flat_param"


def files_of(name: str) -> list[Path]:
    """Return the ranks' files in order, then the shared one, for X, X.pt or the name of one of them."""
    path = Path(name)
    stem = re.sub(r"-(shared|rank-\d+)$", "", path.name.removesuffix(".pt"))
    pattern = re.compile(re.escape(stem) + r"-rank-(\d+)\.pt")
    found = [pattern.fullmatch(beside.name) for beside in path.parent.glob("*")]
    ranks = 1 + max((int(match[1]) for match in found if match), default=0)
    return [
        path.with_name(f"{stem}-{kind}.pt") for kind in (*map("rank-{}".format, range(ranks)), "shared")
    ]


def read(paths: list[Path]) -> tuple[SavedModel, list[str]]:
    """Return Meta's files as one checkpoint, and a sentence for each thing without a counterpart.

    Experts are copied to memory once. All else stays mapped.

    Raises:
        ValueError: a file or weight is missing, corrupt or flattened, or the model has no equal here.
    """
    saved = SavedModel.open(paths[SHARED])
    weights = [_weights(file) for file in (*map(SavedModel.open, paths[:SHARED]), saved)]
    num_experts, rows = _checked(paths, weights)
    sources: dict[str, list[Row]] = {}  # for each of our weights: one row, or those of experts and copies
    for row in rows:
        sources.setdefault(row.ours, []).append(row)
    model: Tensors = {}
    notes: list[str] = []
    for name, own in sources.items():
        tensors = [weights[row.file][row.theirs] for row in own]
        for i, (row, tensor) in enumerate(zip(own, tensors, strict=True)):
            first = i % num_experts
            if (shape := tuple(tensor.shape)) != (expected := tuple(tensors[0].shape)):
                _refuse(paths[row.file], f"whose {row.theirs} has the shape {shape} and not {expected}")
            if first != i and not notes and not torch.equal(tensor, tensors[first]):
                notes.append(
                    f"{paths[row.file]} and {paths[own[first].file]} hold one expert with different "
                    f"weights ({row.theirs}); those of the second are taken."
                )
        model[name] = tensors[0] if own[0].expert is None else torch.stack(tensors[:num_experts])
    saved.rename("task", meta_names.TASKS.get(saved.name("task"), saved.name("task")))
    use_moe_variants(saved)
    saved.restart(model)
    saved.options_of("checkpoint").update(checkpoint_suffix="")  # it was -rank-N
    hidden_dims = {
        name.partition(".")[0]: stack.shape[1]
        for name, stack in model.items()
        if name.endswith(".experts.fc1_weight")
    }
    notes += meta_names.translate(saved.options, num_experts, hidden_dims)
    _refuse_other_layers(saved)
    return saved, notes


def _weights(file: SavedModel) -> Tensors:
    """Return the weights in a file, without the prefixes of sharded data parallel."""
    weights: Tensors = {}
    for key, tensor in file.weights.items():
        name = re.sub(WRAPPERS, "", key.removeprefix("module."))
        if re.search(FLAT, name):
            raise ValueError(
                f"--input names {file.path}, which holds flattened weights ({key}) of a sharded training "
                "run; save it from Meta's branch without --use-sharded-state."
            )
        weights[name] = tensor
    return weights


def _refuse(path: Path, what: str, fix: str = "give the files of one training run") -> NoReturn:
    raise ValueError(f"--input names {path}, {what}; {fix}.")


def _checked(paths: list[Path], weights: list[Tensors]) -> tuple[int, list[Row]]:
    """Return E and the table of weights, which must be those in the files."""
    *ranks, shared = weights
    gates = {name.removesuffix(GATE): t for name, t in shared.items() if name.endswith(GATE)}
    if not gates:
        what = f"which has no experts (no …{GATE})"
        _refuse(paths[SHARED], what, "a dense checkpoint needs no conversion")
    if len({gate.shape[0] for gate in gates.values()}) > 1:
        what = "whose layers have different numbers of experts, which Meta's options cannot express"
        _refuse(paths[SHARED], what)
    layer, experts = next((layer, gate.shape[0]) for layer, gate in gates.items())
    found = (re.search(r"\.moe_layer\.experts\.(\d+)\.", name) for rank in ranks for name in rank)
    local = len({match[1] for match in found if match})
    if (held := local * len(ranks)) < experts or held % experts:
        missing = Path(str(paths[0]).replace("-rank-0", f"-rank-{len(ranks)}"))
        what = f"which does not exist: {layer} has {experts} experts, {local} in each file"
        _refuse(missing, what, "give all of them")
    if local > 1 and held > experts:
        _refuse(paths[-2], f"which makes {held} experts of {layer}, not {experts}")
    rows = meta_names.table(shared, experts, len(ranks))
    for row in rows:
        if row.theirs not in weights[row.file]:
            _refuse(paths[row.file], f"which lacks {row.theirs}")
    known = {(row.file, row.theirs) for row in rows}
    for file in range(SHARED, len(ranks)):
        for name in weights[file]:
            if (file, name) not in known or (file == SHARED and not STOCK.fullmatch(name)):
                what = f"which has the weight {name}, that no model here has"
                _refuse(paths[file], what, "convert a checkpoint without it")
    return experts, rows


def _refuse_other_layers(saved: SavedModel) -> None:
    """Refuse weights whose MoE layers differ from those of the options."""
    for side in dict.fromkeys(layer.side for layer in saved.layers):
        layers = [layer for layer in saved.layers if layer.side == side]
        freq = saved.options.get(f"{side}_moe_freq", saved.options["moe_freq"])
        expected = chosen_layers(range(len(layers)), freq)
        found = [layer.index for layer in layers if layer.has_experts]
        if found != expected:
            raise ValueError(
                f"--input has experts in the {side} layers {found}, but its options say {expected} "
                f"(--moe-freq {freq}); give the files of one training run."
            )
