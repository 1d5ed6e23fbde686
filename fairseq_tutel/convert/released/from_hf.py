"""Converts a folder in Hugging Face's format to a folder with a fairseq checkpoint.

Experts are written to shard files, with one expert's tensor in memory at a time.
"""

import argparse
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert import sharded
from fairseq_tutel.convert.command import NEW_RUN
from fairseq_tutel.convert.configs import (
    Tensors,
    counts_text,
    new_checkpoint,
    print_notes,
    refuse_other_rows,
    task_of,
)
from fairseq_tutel.convert.released.families import FAMILIES
from fairseq_tutel.convert.released.families.nllb_moe import TOP_K
from fairseq_tutel.convert.released.folder import CONFIG, ReleasedFolder
from fairseq_tutel.convert.released.keep import kept_experts
from fairseq_tutel.convert.released.output import new_folder
from fairseq_tutel.convert.released.table import Family, Row, Setup
from fairseq_tutel.convert.released.vocabulary import TOKENIZER_FILES, Vocabulary, vocabulary_of
from fairseq_tutel.files import shown
from fairseq_tutel.tools.arguments import refuse_output_folder

CHECKPOINT = "model.pt"
# Entries of config.json that do not change a model's outputs, because they concern generation or training.
UNUSED = (
    r"_.*|.*_token_id|.*_version|add_bias_logits|add_cross_attention|architectures|bad_words_ids"
    r"|begin_suppress_tokens|chunk_size.*|classif.*|cross_attention_hidden_size|diversity_penalty"
    r"|do_sample|early_stopping|encoder_no_repeat_ngram_size|exponential_decay.*|finetuning_task"
    r"|forced_.*|gradient_checkpointing|id2label|init_std|initializer_.*|is_.*|label2id|length_penalty"
    r"|max_length|min_length|model_type|no_repeat_ngram_size|num_beam_groups|num_beams|num_hidden_layers"
    r"|num_labels|num_return_sequences|output_.*|prefix|problem_type|pruned_heads|remove_invalid_values"
    r"|repetition_penalty|return_dict.*|(src_|tgt_)?vocab_size|suppress_tokens|task_specific_params"
    r"|temperature|tf_legacy_loss|tie_encoder_decoder|tokenizer_class|top_[kp]|torch_dtype|dtype"
    r"|torchscript|typical_p|use_bfloat16|use_cache"
)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Options of `convert from-hf` for models with experts."""

    expert_dtype: str = ""  # The dtype of stored experts: fp32 or one of EXPERT_DTYPES.
    keep: Path | None = None  # A JSON file that lists the experts to keep.
    pairs: Sequence[str] = ()  # Language pairs for which `keep` lists experts.


@dataclass(frozen=True)
class ReleasedStack:
    """A stacked tensor [E, ...] whose experts are read from a Hugging Face folder on demand."""

    folder: ReleasedFolder
    names: tuple[str, ...]  # The tensor name of each expert.
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Tensor:
        """Return one expert's tensor; raise ValueError if its shape differs from config.json."""
        name, tensor = self.names[expert], self.folder.read(self.names[expert])
        if tuple(tensor.shape) != self.shape[1:] or not tensor.dtype.is_floating_point:
            raise ValueError(
                f"INPUT {self.folder.path} has {name} of {tensor.dtype} {list(tensor.shape)}, but "
                f"{CONFIG} describes {list(self.shape[1:])}; give a complete folder of one model."
            )
        return tensor.to(self.dtype)


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert from-hf`."""
    refuse_output_folder(output, inputs[0], CHECKPOINT, arguments.overwrite)
    pairs = arguments.keep_for.split(",") if arguments.keep_for is not None else ()
    how = Experts(expert_dtype=arguments.expert_dtype or "", keep=arguments.keep_experts, pairs=pairs)
    saved, notes = convert(ReleasedFolder(inputs[0]), output, how)
    print_notes(notes)
    return f"/{CHECKPOINT}: {saved.name('model')}, task {saved.name('task')}{NEW_RUN}"


def convert(
    folder: ReleasedFolder, output: Path, how: Experts | None = None
) -> tuple[SavedModel, list[str]]:
    """Write a fairseq checkpoint, dictionary and BPE files to a folder.

    Args:
        folder: the Hugging Face model.
        output: the folder to write, which has a temporary name until it is complete.
        how: options for the experts, which have no effect on dense models.

    Returns:
        The checkpoint, and notes on the conversion to print.

    Raises:
        ValueError: the folder cannot be converted or written.
    """
    how, config = how or Experts(), folder.json(CONFIG)
    family = family_of(config)
    options = family.read_options(config)
    of_experts = {name for names, _ in family.stacks(options).values() for name in names}
    if not of_experts and how != Experts():
        raise ValueError(
            f"INPUT is {folder.path}, a model without experts; remove --expert-dtype, --keep-experts and "
            "--keep-for."
        )
    weights = weights_of(folder, family, options, of_experts)
    stacks = _experts(folder, family, options, how, weights) if of_experts else {}
    check_sizes(family, config, weights, options)
    tables = {name: len(table) for name, table in weights.items() if name.endswith("embed_tokens.weight")}
    vocabulary = vocabulary_of(folder, family, config, tables)
    preprocessor = "preprocessor_config.json"
    normalizes = folder.has(preprocessor) and bool(folder.json(preprocessor).get("do_normalize"))
    setup = Setup(options, config, vocabulary.kind, vocabulary.languages, normalizes)
    saved = checkpoint(family, setup, vocabulary, {**weights, **stacks})
    notes = notes_of(family, config, vocabulary) + family.notes(options)
    with new_folder(output) as made:
        for name in TOKENIZER_FILES:
            if folder.has(name):
                shutil.copyfile(folder.path / name, made / name)
        vocabulary.write(made)
        if vocabulary.files:
            task = task_of(saved, {"data": str(made)})
            refuse_other_rows(saved, task.source_dictionary, task.target_dictionary)
        if stacks:
            dtype = how.expert_dtype if how.expert_dtype != "fp32" else ""
            _, errors = sharded.to_sharded(saved, made / CHECKPOINT, dtype)
            notes += sharded.error_lines(errors)
        else:
            saved.write(made / CHECKPOINT)
    return saved, notes


def _experts(
    folder: ReleasedFolder, family: Family, options: dict[str, Any], how: Experts, weights: Tensors
) -> dict[str, ReleasedStack]:
    """Return stacked tensors of the experts to keep; remove other experts' gate rows from `weights`.

    The function sets `moe_expert_count` in `options` to the number of kept experts of each layer.
    """
    if how.pairs and how.keep is None:
        raise ValueError(
            f"--keep-for is {shown(','.join(how.pairs))}, but no experts are listed; add "
            "--keep-experts FILE."
        )
    count, stacks = int(options["moe_expert_count"]), family.stacks(options)
    layers = list(dict.fromkeys(name.partition(".fc1.")[0] for name in stacks))
    kept = {layer: list(range(count)) for layer in layers}
    if how.keep is not None:
        kept = kept_experts(how.keep, how.pairs, layers, count, TOP_K)
    options["moe_expert_count"] = counts_text([len(ids) for ids in kept.values()])
    full = {full: name for name, full in full_names(folder, family, weights).items()}
    for name in (f"{layer}.fc1.gate.{kind}" for layer in layers for kind in ("weight", "bias")):
        if name in weights:
            if weights[name].shape[:1] != (count,):
                raise ValueError(
                    f"INPUT has {name} (in fairseq's naming) of shape {tuple(weights[name].shape)}, but "
                    f"{CONFIG} has {count} experts; give the {CONFIG} of this model."
                )
            weights[name] = weights[name][torch.tensor(kept[name.partition(".fc1.")[0]])]
    if lacking := [name for names, _ in stacks.values() for name in names if name not in full]:
        raise ValueError(
            f"INPUT {folder.path} lacks {len(lacking)} tensors of experts that {CONFIG} describes, such as "
            f"{lacking[0]}; give a complete folder."
        )
    found = {}
    for stack, (names, shape) in stacks.items():
        own = tuple(full[names[i]] for i in kept[stack.partition(".fc1.")[0]])
        dtype = torch.float32 if how.expert_dtype == "fp32" else folder.read(own[0]).dtype
        found[stack] = ReleasedStack(folder, own, (len(own), *shape), dtype)
    return found


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the model family of a config.json.

    Raises:
        ValueError: models with this model_type or class cannot be converted.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ValueError(
            f"config.json has model_type {shown(config.get('model_type'))}, which cannot be converted; the "
            f"supported types are {', '.join(FAMILIES)}."
        )
    named = config.get("architectures") or [family.architectures[0]]
    if not isinstance(named, list) or named[0] not in family.architectures:
        raise ValueError(
            f"config.json has architectures {shown(named)}, which cannot be converted; for model_type "
            f"{family.name}, give a {' or '.join(family.architectures)}."
        )
    return family


def checkpoint(
    family: Family, setup: Setup, vocabulary: Vocabulary, weights: Mapping[str, Any]
) -> SavedModel:
    """Return a checkpoint with the given weights, and fairseq-train's defaults for options not given."""
    own = setup.options | family.setup(setup)
    task_state = own.pop("task_state", {})
    words = ["--task", own.pop("task", family.task), "--arch", family.arch, *family.words]
    added = {name: torch.tensor(values) for name, values in family.constants.items()}
    for name, shape in family.unused.items():
        if shape:
            added[name] = torch.zeros([int(own.get(word, 0)) or int(word) for word in shape.split()])
    saved = new_checkpoint(words, own, {**weights, **added}, task_state)
    saved.state["cfg"] |= {"bpe": vocabulary.bpe or None, "tokenizer": vocabulary.tokenizer or None}
    return saved


def full_names(folder: ReleasedFolder, family: Family, known: Collection[str]) -> dict[str, str]:
    """Return a dict from a folder's tensor names to these names with the family's prefix.

    The dict has the order of the weight files. Names in `known` get no prefix.
    """
    # If a model was saved without its head, its tensor names lack the prefix.
    has_prefix = any(name.startswith(family.prefix) for name in folder.names())
    return {name: name if has_prefix or name in known else family.prefix + name for name in folder.names()}


def weights_of(
    folder: ReleasedFolder, family: Family, options: Mapping[str, Any], skipped: Collection[str] = ()
) -> Tensors:
    """Return a folder's tensors under fairseq's names, memory-mapped.

    `skipped` has the names of tensors that are not converted.

    Raises:
        ValueError: a tensor is missing or has no counterpart in fairseq.
    """
    rows = family.rows(options)
    row_of = {name: row for row in rows for name in row.theirs}
    found: dict[Row, Tensor] = {}
    others: dict[str, Tensor] = {}
    for name, full in full_names(folder, family, row_of).items():
        row = row_of.get(full)
        if row is None:
            if full not in skipped and not re.fullmatch(family.dropped, full):
                others[full] = folder.read(name)
            continue
        tensor = folder.read(name)
        if row in found and not torch.equal(found[row], tensor):
            raise ValueError(
                f"INPUT has different tensors {name} and {row.theirs[0]}, but fairseq's model has one "
                "tensor for both; this model cannot be converted."
            )
        found.setdefault(row, tensor)
    for row in rows:
        if row not in found:
            raise ValueError(
                f"INPUT {folder.path} lacks the tensor {row.theirs[0]}; give a complete folder."
            )
    weights = {ours: found[row] for row in rows for ours in row.ours}
    for ours, theirs in family.summed.items():
        table = others.pop(theirs, None)
        if table is not None:
            if table.dim() != 2 or table.shape[1:] != weights[ours].shape[1:] or not len(table):
                raise ValueError(
                    f"INPUT has the tensor {theirs} of shape {tuple(table.shape)}, which cannot be added "
                    "to the positions; give a complete folder."
                )
            weights[ours] = weights[ours] + table[0]
    for name, tensor in others.items():
        if name not in family.zeros or tensor.any():
            raise ValueError(
                f"INPUT has the tensor {name}{' that is not zero' * (name in family.zeros)}, which "
                f"fairseq's {family.arch} does not have; this model cannot be converted."
            )
    return weights


def check_sizes(
    family: Family, config: Mapping[str, Any], weights: Tensors, options: Mapping[str, Any]
) -> None:
    """Raise ValueError if a tensor's shape does not fit config.json, or its dtype is not floating-point."""
    for name, tensor in weights.items():
        wanted = shape_of(name, tensor, options)
        if not tensor.is_floating_point() or (wanted is not None and tuple(tensor.shape) != wanted):
            raise ValueError(
                f"INPUT has the tensor {name} (in fairseq's naming) of {tensor.dtype} and of shape "
                f"{tuple(tensor.shape)}, but {CONFIG} requires {wanted} of floating-point numbers; "
                f"give the {CONFIG} of this model."
            )
    for key, number in family.sizes(weights).items():
        if config.get(key, number) != number:
            raise ValueError(
                f"{CONFIG} has {key} {shown(config[key])}, but the embedding table has {number} rows; give "
                f"the {CONFIG} of this model."
            )


def shape_of(name: str, tensor: Tensor, options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return a fairseq tensor's shape from fairseq's options, or None if options do not determine it.

    The number of symbols or experts is read from `tensor`, because the options lack this number.
    """
    side = name.partition(".")[0]
    if side not in ("encoder", "decoder"):
        return None
    dim, hidden = options[f"{side}_embed_dim"], options[f"{side}_ffn_embed_dim"]
    part, _, kind = name.rpartition(".")
    part = part.rpartition(".")[2]
    if name.endswith("embed_tokens.weight") or part == "gate":
        return (*tensor.shape[:1], dim) if kind == "weight" else tuple(tensor.shape[:1])
    if part == "embed_positions":
        key = "max_target_positions" if side == "decoder" else "max_source_positions"
        # The position table begins with two additional rows for padding.
        return int(options.get(key) or options["max_positions"]) + 2, dim
    if part.endswith("layer_norm") or part == "layernorm_embedding":
        return (dim,)
    if part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        return (dim, dim) if kind == "weight" else (dim,)
    if part in ("fc1", "fc2"):
        rows, columns = (hidden, dim) if part == "fc1" else (dim, hidden)
        return (rows, columns) if kind == "weight" else (rows,)
    return None


def notes_of(family: Family, config: Mapping[str, Any], vocabulary: Vocabulary) -> list[str]:
    """Return notes on entries of config.json, and on files, that are not converted."""
    used = {option.theirs for option in family.options} | family.assumed.keys()
    ignored = re.compile(f"{UNUSED}|{family.ignored}")
    unknown = sorted(key for key in config if key not in used and not ignored.fullmatch(key))
    notes = []
    if unknown:
        notes.append(f"config.json has entries that are not converted: {', '.join(map(shown, unknown))}.")
    if family.vocabulary and not vocabulary.bpe:
        notes.append("the folder has no SentencePiece model; texts must be encoded before.")
    if vocabulary.markers:
        names = ", ".join(map(shown, vocabulary.markers))
        notes.append(f"the tokens {names} keep their IDs, but fairseq's BPE does not find them in a text.")
    return notes
