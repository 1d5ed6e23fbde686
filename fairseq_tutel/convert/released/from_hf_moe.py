"""Converts a released Mixture-of-Experts model to a sharded checkpoint, tensor by tensor.

The experts never are in memory together. After an interruption, the same command continues.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.checkpoint.shards import ShardedTensor
from fairseq_tutel.convert.configs import Tensors, counts_text
from fairseq_tutel.convert.released import from_hf
from fairseq_tutel.convert.released.expert_files import Target, write_experts
from fairseq_tutel.convert.released.families.nllb_moe import TOP_K, MoEFamily, notes_of
from fairseq_tutel.convert.released.folder import CONFIG, ReleasedFolder
from fairseq_tutel.convert.released.keep import kept_experts
from fairseq_tutel.convert.released.unfinished import finishing, key_of
from fairseq_tutel.convert.released.vocabulary import vocabulary_of
from fairseq_tutel.files import shown
from fairseq_tutel.parallel.groups import Slice

# Change this number if the same input and options give other files.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Options of the import of experts."""

    expert_dtype: str = ""  # fp32, or one of EXPERT_DTYPES; by default the dtype of the input
    keep: Path | None = None  # JSON file that lists the experts to keep; by default all
    pairs: Sequence[str] = ()  # language pairs for which `keep` lists experts


def convert(
    folder: ReleasedFolder, output: Path, how: Experts, log: Callable[[str], None]
) -> tuple[SavedModel, list[str]]:
    """Write a sharded checkpoint, its dictionary and its BPE files to a folder.

    Args:
        folder: the released model.
        output: the folder to write; until it is complete, its name ends with .unfinished.
        how: options of the experts.
        log: gets a line for each finished part.

    Returns:
        The checkpoint, and notes to print.

    Raises:
        ValueError: the folder cannot be converted or written.
    """
    if how.pairs and how.keep is None:
        raise ValueError(
            f"--keep-for is {shown(','.join(how.pairs))}, but no experts are listed; add --keep-experts "
            "FILE."
        )
    config = folder.config()
    family = from_hf.family_of(config)
    assert isinstance(family, MoEFamily)
    options = family.read_options(config)
    count, layers = int(options["moe_expert_count"]), family.moe_layers(options)
    if count * len(layers) > len(folder.names()):
        raise ValueError(
            f"{CONFIG} has num_experts {count} and {len(layers)} layers with experts, but INPUT has only "
            f"{len(folder.names())} tensors; give the {CONFIG} of this model."
        )
    kept = {layer: list(range(count)) for layer in layers}
    if how.keep is not None:
        kept = kept_experts(how.keep, how.pairs, layers, count, TOP_K)
    options["moe_expert_count"] = counts_text([len(ids) for ids in kept.values()])
    rows = {row.theirs: row for layer in layers for row in family.expert_rows(layer, count)}
    names = _names(folder, family, options)
    _refuse_missing(folder, rows, names)
    weights = from_hf.weights_of(folder, family, options, skipped=rows)
    _keep_rows(weights, kept, count)
    from_hf.check_sizes(family, config, weights, options)
    vocabulary = vocabulary_of(folder, family, config, from_hf.table_rows(weights))
    setup = from_hf.setup_of(folder, config, options, vocabulary)
    saved = from_hf.checkpoint(family, setup, vocabulary, weights)
    targets = _targets(rows, names, kept)
    with finishing(output, _key(folder, how, kept), log) as work:
        stacks = _stacks(folder, family, options, targets, kept, how.expert_dtype, work.folder)
        for name, stack in write_experts(folder, targets, stacks, work).items():
            saved.weights[name] = stack.record()
            if stack.expert_dtype:
                log(f"{name}: relative error {stack.error[0]:.2e}, worst row's error {stack.error[1]:.2e}")
        from_hf.write_vocabulary(saved, vocabulary, folder.path, work.folder)
        saved.write(work.folder / from_hf.CHECKPOINT)
    return saved, [*from_hf.notes_of(family, config, vocabulary), *notes_of(options)]


def _names(folder: ReleasedFolder, family: MoEFamily, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the name in the folder of each tensor, by its name with the prefix."""
    known = {name for row in family.rows(options) for name in row.theirs}
    return {full: name for name, full in from_hf.full_names(folder, family, known).items()}


def _refuse_missing(folder: ReleasedFolder, rows: Mapping[str, Any], names: Mapping[str, str]) -> None:
    missing = [name for name in rows if name not in names]
    if missing:
        raise ValueError(
            f"{folder.flag} {folder.path} lacks {len(missing)} tensors of experts that {CONFIG} describes, "
            f"such as {missing[0]}; give a complete folder."
        )


def _keep_rows(weights: Tensors, kept: Mapping[str, Sequence[int]], count: int) -> None:
    """Remove the rows of other experts from the gates, in place."""
    for layer, ids in kept.items():
        for name in (f"{layer}.fc1.gate.weight", f"{layer}.fc1.gate.bias"):
            if name not in weights:
                continue
            shape = tuple(weights[name].shape)
            if shape[:1] != (count,):
                raise ValueError(
                    f"INPUT has {name} of shape {shape} (in fairseq's naming), but {CONFIG} has {count} "
                    f"experts; give the {CONFIG} of this model."
                )
            if len(ids) < count:
                weights[name] = weights[name][torch.tensor(ids)]


def _targets(
    rows: Mapping[str, Any], names: Mapping[str, str], kept: Mapping[str, Sequence[int]]
) -> dict[str, Target]:
    """Return, for the name of each kept tensor of an expert in the folder, its place in the output."""
    new = {(layer, old): i for layer, ids in kept.items() for i, old in enumerate(ids)}
    found = {}
    for full, row in rows.items():
        layer = row.stack.partition(".fc1.")[0]
        if (layer, row.expert) in new:
            found[names[full]] = Target(row.stack, new[layer, row.expert])
    return found


def _stacks(
    folder: ReleasedFolder,
    family: MoEFamily,
    options: Mapping[str, Any],
    targets: Mapping[str, Target],
    kept: Mapping[str, Sequence[int]],
    expert_dtype: str,
    root: Path,
) -> dict[str, ShardedTensor]:
    """Return the stacked tensors of all MoE layers, without the files of their experts."""
    dtype = torch.float32 if expert_dtype == "fp32" else folder.read(next(iter(targets))).dtype
    found = {}
    for stack in dict.fromkeys(target.stack for target in targets.values()):
        shape = (len(kept[stack.partition(".fc1.")[0]]), *family.expert_shape(stack, options))
        made = ShardedTensor(
            root=root, folder="", shape=shape, dtype=dtype, slicing=Slice(), pieces=(),
            expert_dtype="" if expert_dtype == "fp32" else expert_dtype,
        )  # fmt: skip
        found[stack] = made if made.quantized else replace(made, expert_dtype="")
    return found


def _key(folder: ReleasedFolder, how: Experts, kept: Mapping[str, Sequence[int]]) -> str:
    """Return a hash of the options and of the identity of the input files."""
    files = [(name, folder.path / name) for name in folder.shards()]
    facts = [(name, (status := path.stat()).st_size, status.st_mtime_ns) for name, path in files]
    config = hashlib.sha256((folder.path / CONFIG).read_bytes()).hexdigest()
    return key_of([VERSION, config, facts, how.expert_dtype, dict(kept)])
