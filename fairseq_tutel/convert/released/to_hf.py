"""Converts a fairseq checkpoint to a folder in the format of Hugging Face."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.configs import Tensors
from fairseq_tutel.convert.released.families import FAMILIES
from fairseq_tutel.convert.released.families.nllb_moe import MoEFamily
from fairseq_tutel.convert.released.folder import CONFIG
from fairseq_tutel.convert.released.table import Family
from fairseq_tutel.convert.released.vocabulary import TOKENIZER_FILES
from fairseq_tutel.convert.safetensors_folder import as_json, new_folder, write_text, write_weights

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Our tensors that hold no weights.
BUFFERS = ("version", "_float_tensor")


def convert(
    saved: SavedModel, output: Path, limit: int, name: str = "", tokenizer: Path | None = None
) -> str:
    """Write a checkpoint to a folder in the format of Hugging Face; return the name of its class.

    Args:
        saved: the open checkpoint.
        output: the folder to write.
        limit: maximum number of bytes of a weight file.
        name: the family of the model; by default, it follows from the options.
        tokenizer: folder with the tokenizer files to copy.

    Raises:
        ValueError: the model has no counterpart, or the folder could not be written.
    """
    family = _family(saved, name)
    config = family.write_options(saved.options)
    weights = weights_of(saved.weights, family, saved.options)
    config |= written_last(saved, family, weights)
    write(output, weights, config, limit, tokenizer)
    return family.architectures[0]


def written_last(saved: SavedModel, family: Family, weights: Tensors) -> dict[str, Any]:
    """Return the entries of config.json that do not follow from the family's table of options."""
    config = {**family.sizes(saved.weights)}
    config |= family.write_more(saved.options_of("task") | saved.options)
    return config | {"dtype": _dtype(weights)}


def write(
    output: Path, weights: Mapping[str, Any], config: dict[str, Any], limit: int, tokenizer: Path | None
) -> None:
    """Write weights, config.json and the tokenizer files of another folder to a folder."""
    with new_folder(output) as made:
        write_weights(weights, made, limit)
        write_text(made / CONFIG, as_json(config))
        for file in TOKENIZER_FILES:
            if tokenizer is not None and (tokenizer / file).is_file():
                shutil.copyfile(tokenizer / file, made / file)


def _family(saved: SavedModel, name: str) -> Family:
    """Return the family with this name, or the only one that has the model's options.

    Raises:
        ValueError: no family has these options.
    """
    if name:
        return FAMILIES[name]
    dense = {key: family for key, family in FAMILIES.items() if not isinstance(family, MoEFamily)}
    reasons = {}
    for key, family in dense.items():
        try:
            family.write_options(saved.options)
            weights_of(saved.weights, family, saved.options)
        except ValueError as error:
            reasons[key] = str(error)
    fitting = [family for key, family in dense.items() if key not in reasons]
    if fitting:
        # RoBERTa and XLM-RoBERTa differ only in the task.
        return min(fitting, key=lambda family: family.task != saved.name("task"))
    closest = min(reasons, key=lambda key: dense[key].distance(saved.options, saved.weights))
    raise ValueError(
        f"{saved.flag} is a {saved.name('model')}, which no class of transformers equals; the closest "
        f"family is {closest}: {reasons[closest]}"
    )


def weights_of(ours: Mapping[str, Any], family: Family, options: Mapping[str, Any]) -> Tensors:
    """Return the tensors of a checkpoint under their names; a tied tensor has one name.

    Raises:
        ValueError: a tensor is missing or has no counterpart.
    """
    found: Tensors = {}
    used = {*family.constants, *family.unused}
    for row in family.rows(options):
        names = [name for name in row.ours if name in ours]
        if not names:
            raise ValueError(
                f"INPUT lacks the tensor {row.ours[0]} of a {family.architectures[0]}; give a checkpoint "
                "of such a model."
            )
        tensor: Tensor = ours[names[0]]
        for name in names[1:]:
            if ours[name] is not tensor and not torch.equal(ours[name], tensor):
                raise ValueError(
                    f"INPUT has different tensors {name} and {names[0]}, but a {family.architectures[0]} "
                    "has one tensor for both; this model cannot be converted."
                )
        found[row.theirs[0]] = tensor
        used |= {*names}
    for name in ours:
        if name not in used and name.rpartition(".")[2] not in BUFFERS:
            raise ValueError(
                f"INPUT has the tensor {name}, which a {family.architectures[0]} does not have; this "
                "model cannot be converted."
            )
    sizes = family.sizes(ours)
    for name, shape in family.zeros.items():
        found[name] = torch.zeros([sizes.get(word) or int(word) for word in shape.split()])
    for summed, name in family.summed.items():
        found[name] = torch.zeros_like(ours[summed][:1])
    return found


def _dtype(weights: Tensors) -> str:
    found = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    return DTYPES.get(found.pop(), "float32") if len(found) == 1 else "float32"
