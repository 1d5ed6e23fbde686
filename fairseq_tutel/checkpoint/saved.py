"""SavedModel: a fairseq checkpoint that is opened, inspected, edited and written."""

import argparse
import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint import atomic_save
from fairseq_tutel.checkpoint.files import read_file
from fairseq_tutel.checkpoint.malformed import refuse_malformed
from fairseq_tutel.checkpoint.shards import bind, unbind
from fairseq_tutel.files.atomic import renamed_when_whole

# The parts of a configuration, and the key of each part's name in a flat one.
PARTS = {"model": "arch", "task": "task", "criterion": "criterion", "optimizer": "optimizer"}
# A dense layer's FFN tensors, and those that --scale-fc adds.
DENSE = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
LAYER_NORM = ("ffn_layernorm.weight", "ffn_layernorm.bias")
# The position of a new training run, and an entry of its history.
START = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
NO_HISTORY = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
FULL = (errno.ENOSPC, errno.EDQUOT)

_LAYER = re.compile(
    r"\b(?P<name>(?P<side>encoder|decoder|stages\.\d+)(?P<inner>\.sentence_encoder)?"
    r"\.((transformer_)?layers|blocks)\.(?P<index>\d+))\.fc1\.(?P<what>weight|experts\.)"
)
# Tensors by name; experts may be `ShardedTensor`s, which are read with the same indexing.
Weights = dict[str, Any]


@dataclass(frozen=True, order=True)
class Layer:
    """A layer with an FFN or experts, sorted as in --moe-expert-count: the encoder's first."""

    stack: int  # number of its side among the sides; for a stage of Swin its number
    index: int  # within its side, from 0
    side: str  # encoder, decoder or, in Swin, stages.N
    name: str  # prefix of its tensors, such as decoder.layers.1
    has_experts: bool

    @property
    def moe(self) -> str:
        """The name of the MoE layer, which replaces fairseq's fc1."""
        return f"{self.name}.fc1"

    @property
    def label(self) -> str:
        """The layer's name in logs and options, such as decoder_1."""
        return layer_label(self.moe)


def layer_label(name: str) -> str:
    """Return the label of a MoE layer by its qualified name.

    decoder.layers.3.fc1 -> decoder_3, stages.2.blocks.1.fc1 -> stages_2_1. With one model per language
    pair the label begins with the pair: de-en_decoder_3.
    """
    parts = name.removeprefix("models.").split(".")
    names = 2 if name.startswith("models.") else 1
    return "_".join([*parts[:names], *filter(str.isdecimal, parts[names:-1])])


def layers_of(weights: Iterable[str], within: bool = False) -> list[Layer]:
    """Return the layers with an FFN or experts, sorted; `within`: also those of a model inside another."""
    found = set()
    for key in weights:
        if match := (_LAYER.search if within else _LAYER.match)(key):
            # Older roberta models call their encoder decoder.sentence_encoder.
            side = "encoder" if match["inner"] else match["side"]
            stack = int(side.partition(".")[2] or side == "decoder")
            has_experts = match["what"] != "weight"
            name = key[: match.end("name")]
            found.add(Layer(stack, int(match["index"]), side, name, has_experts))
    return sorted(found)


class SavedModel:
    """An open checkpoint. Tensors stay in their file until they are read; edits change `state`."""

    def __init__(self, state: dict[str, Any], path: Path | None = None, flag: str = "--input") -> None:
        self.state, self.path, self.flag = state, path, flag

    @classmethod
    def open(cls, path: Path, flag: str = "--input", keep_shards: bool = False) -> "SavedModel":
        """Open a checkpoint that the argument `flag` names; a bad file or shard is a ValueError.

        With `keep_shards`, experts in shard files are `ShardedTensor`s, which are read later.
        """
        state = read_file(path, flag)
        if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
            raise ValueError(f"{flag} names {path}, which holds no model; give a fairseq checkpoint.")
        refuse_malformed(state, f"{flag} {path}")
        bind(state, path)
        if not keep_shards:
            unbind(state)
        return cls(state, path, flag)

    @property
    def weights(self) -> Weights:
        """The model's state dict."""
        weights: Weights = self.state["model"]
        return weights

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers with an FFN or experts, as the file has them."""
        return layers_of(self.weights)

    def stacks(self, layer: Layer) -> Weights:
        """Return the tensors [E, ...] of a layer's experts, by their names in an expert."""
        prefix = f"{layer.moe}.experts."
        own = {k.removeprefix(prefix): t for k, t in self.weights.items() if k.startswith(prefix)}
        # Names with a dot belong to modules that all experts share, such as a layer norm.
        return {name: tensor for name, tensor in own.items() if "." not in name}

    def expert(self, layer: Layer, expert_id: int) -> dict[str, Tensor]:
        """Return the tensors of one expert by its global ID."""
        return {name: stack[expert_id] for name, stack in self.stacks(layer).items()}

    def num_experts(self, layer: Layer) -> int:
        """Return the number of a layer's experts."""
        return int(next(iter(self.stacks(layer).values())).shape[0])

    def dense_ffn(self, layer: Layer) -> dict[str, Tensor]:
        """Return the tensors of a dense FFN by their names in the layer; a missing one is a ValueError."""
        names = {key: f"{layer.name}.{key}" for key in (*DENSE, *LAYER_NORM)}
        for key in DENSE:
            if names[key] not in self.weights:
                raise ValueError(
                    f"{self.flag} lacks {names[key]}, a tensor of fairseq's FFN; give a checkpoint of a "
                    "transformer."
                )
        return {key: self.weights[name] for key, name in names.items() if name in self.weights}

    @property
    def options(self) -> dict[str, Any]:
        """The model's options; raises ValueError if there are none. Edits change the checkpoint."""
        found = self.options_of("model")
        if not found:
            raise ValueError(
                "the checkpoint has no options of a model (neither args nor cfg); give one of a fairseq "
                "training run."
            )
        return found

    def options_of(self, part: str) -> dict[str, Any]:
        """Return the options of a part of the configuration; older files have one flat set of options."""
        args = self.state.get("args")
        return _values(self._cfg.get(part) if args is None else args)

    @property
    def all_keys(self) -> set[str]:
        """The keys of all saved options."""
        return set().union(*map(_values, (self.state.get("args"), *self._cfg.values())))

    def name(self, part: str) -> str:
        """Return the name of the model (its architecture), task, criterion or optimizer, or ""."""
        options, is_flat = self.options_of(part), self.state.get("args") is not None
        own = None if is_flat else options.get("_name")  # in a flat one it is the model's
        return str(own or options.get(PARTS[part]) or "")

    def rename(self, part: str, name: str) -> None:
        """Set the name of a part in every copy of the options."""
        _values(self._cfg.get(part))["_name"] = name
        # An encoder-decoder's options are a flat copy of the whole configuration.
        for flat in (self.state.get("args"), *self._cfg.values()):
            if isinstance(flat, argparse.Namespace) and hasattr(flat, PARTS[part]):
                setattr(flat, PARTS[part], name)

    def drop(self, keys: Collection[str]) -> None:
        """Remove options from all parts."""
        for options in map(self.options_of, PARTS):
            for key in keys:
                options.pop(key, None)

    @property
    def _cfg(self) -> dict[str, Any]:
        return self.state.get("cfg") or {}

    def restart(self, weights: Mapping[str, Any] | None = None) -> None:
        """Remove optimizer state, meters and data position, and set weights, as --finetune-from-model."""
        self.state.pop("last_optimizer_state", None)
        self.state["optimizer_history"] = self.state.get("optimizer_history") or [NO_HISTORY]
        self.state["extra_state"] = {"train_iterator": dict(START)}
        if weights is not None:
            self.state["model"] = dict(weights)

    def write(self, output: Path) -> None:
        """Write the checkpoint as one file; raise as `write_all`."""
        unbind(self.state)
        write_all([(output, self.state)])


def _values(options: Any) -> dict[str, Any]:
    """Return the dictionary behind options in any form, which edits change."""
    if isinstance(options, argparse.Namespace):
        return vars(options)
    return options if isinstance(options, dict) else {}


def write_all(contents: Iterable[tuple[Path, Any]]) -> None:
    """Write files, and rename all of them when the last one is complete; a full disk is a ValueError."""
    path = Path()
    try:
        with contextlib.ExitStack() as stack:
            for path, content in contents:
                atomic_save.write(content, stack.enter_context(renamed_when_whole(path)))
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error


def not_written(output: Path, error: Exception) -> ValueError:
    """Return an error with the system's reason why a file was not written."""
    cause = atomic_save.system_error(error)
    number = None if cause is None else cause.errno
    reason = os.strerror(number) if number else str(error).partition("\n")[0]
    fix = "make room, or give another place" if number in FULL else "give another place"
    return ValueError(f"--output {output} could not be written ({reason}); {fix}.")
