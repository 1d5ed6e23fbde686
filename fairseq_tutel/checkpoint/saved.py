"""Provides `SavedModel`, which opens, inspects, edits and writes a fairseq checkpoint."""

import argparse
import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint import atomic_save, dictionaries
from fairseq_tutel.checkpoint.files import read_file, walk
from fairseq_tutel.checkpoint.foreign import refuse_malformed
from fairseq_tutel.checkpoint.options import RETIRED
from fairseq_tutel.checkpoint.shards import bind, unbind
from fairseq_tutel.files import printable, renamed_when_whole
from fairseq_tutel.parallel.progress import progress

logger = logging.getLogger(__name__)

# For each part of a configuration, the option with the part's name in older, flat configurations.
PARTS = {"model": "arch", "task": "task", "criterion": "criterion", "optimizer": "optimizer"}
# The FFN tensors of a dense layer, and the tensors that --scale-fc adds.
DENSE = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
LAYER_NORM = ("ffn_layernorm.weight", "ffn_layernorm.bias")
# The position of a new training run in its data, and the first entry of the run's optimizer history.
START = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
NO_HISTORY = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}

_LAYER = re.compile(
    r"\b(?P<name>(?P<side>encoder|decoder|stages\.\d+)(?P<inner>\.sentence_encoder)?"
    r"\.((transformer_)?layers|blocks)\.(?P<index>\d+))\.fc1\.(?P<what>weight|experts\.)"
)
# Tensors by name. A stacked tensor of experts may be a `ShardedTensor`, which is indexed like a tensor.
Weights = dict[str, Any]


@dataclass(frozen=True, order=True)
class Layer:
    """A layer with an FFN or experts; layers are sorted as in --moe-expert-count, encoder first."""

    stack: int  # Encoders have number 0, decoders 1, and Swin stages 0 to 3.
    index: int  # Layers of an encoder, decoder or stage are numbered from 0.
    side: str  # The side is encoder or decoder or, in Swin, stages.N.
    name: str  # The prefix of the layer's tensor names, such as decoder.layers.1.
    has_experts: bool

    @property
    def moe(self) -> str:
        """The qualified name of the MoE layer that replaces fairseq's fc1 in the model."""
        return f"{self.name}.fc1"

    @property
    def label(self) -> str:
        """The short name of a layer in logs and options, such as decoder_1."""
        return layer_label(self.moe)


def layer_label(name: str) -> str:
    """Convert the qualified name of a MoE layer to its short name in logs and options.

    Examples: decoder.layers.3.fc1 -> decoder_3, stages.2.blocks.1.fc1 -> stages_2_1. In a model for several
    language pairs, the short name begins with the pair: de-en_decoder_3.
    """
    parts = name.removeprefix("models.").split(".")
    names = 2 if name.startswith("models.") else 1
    return "_".join([*parts[:names], *filter(str.isdecimal, parts[names:-1])])


def layers_of(weights: Iterable[str], within: bool = False) -> list[Layer]:
    """Return a sorted list of the layers with an FFN or experts, from the names of the weights.

    With `within`, the function also finds the layers of models inside the model.
    """
    found = set()
    for key in weights:
        if match := (_LAYER.search if within else _LAYER.match)(key):
            # In older roberta models, the encoder is named decoder.sentence_encoder.
            side = "encoder" if match["inner"] else match["side"]
            stack = int(side.partition(".")[2] or side == "decoder")
            has_experts = match["what"] != "weight"
            name = key[: match.end("name")]
            found.add(Layer(stack, int(match["index"]), side, name, has_experts))
    return sorted(found)


class SavedModel:
    """An open fairseq checkpoint, whose tensors stay on disk until they are read; methods edit `state`."""

    def __init__(self, state: dict[str, Any], path: Path | None = None, flag: str = "INPUT") -> None:
        self.state, self.path, self.flag = state, path, flag

    @classmethod
    def open(cls, path: Path, flag: str = "INPUT", keep_shards: bool = False) -> "SavedModel":
        """Open a checkpoint at `path`, a value of the option `flag`; raise ValueError for a bad file.

        With `keep_shards`, experts in shard files become tensors of class `ShardedTensor`, read on demand.
        """
        state = read_file(path, flag)
        if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
            raise ValueError(f"{flag} names {path}, which holds no model; give a fairseq checkpoint.")
        refuse_malformed(state, f"{flag} {path}")
        drop_retired(state, path)
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
        """The layers of the model that have an FFN or experts, in the order of the model."""
        return layers_of(self.weights)

    def stacks(self, layer: Layer) -> Weights:
        """Return the stacked tensors [E, ...] of a layer's experts by name, such as fc1_weight."""
        prefix = f"{layer.moe}.experts."
        own = {k.removeprefix(prefix): t for k, t in self.weights.items() if k.startswith(prefix)}
        # A tensor name with a dot belongs to a module that all experts share, such as a layer norm.
        return {name: tensor for name, tensor in own.items() if "." not in name}

    def expert(self, layer: Layer, expert_id: int) -> dict[str, Tensor]:
        """Return the tensors of one expert of a layer; `expert_id` is the expert's global ID."""
        return {name: stack[expert_id] for name, stack in self.stacks(layer).items()}

    def num_experts(self, layer: Layer) -> int:
        """Return the number of experts of a layer."""
        return int(next(iter(self.stacks(layer).values())).shape[0])

    def dense_ffn(self, layer: Layer) -> dict[str, Tensor]:
        """Return the tensors of a layer's dense FFN by name, such as "fc1.weight".

        Raises:
            ValueError: a tensor of the FFN is missing.
        """
        names = {key: f"{layer.name}.{key}" for key in (*DENSE, *LAYER_NORM)}
        for key in DENSE:
            if names[key] not in self.weights:
                raise ValueError(
                    f"{self.flag} lacks the weight {names[key]} of a fairseq FFN; give a checkpoint of a "
                    "transformer."
                )
        return {key: self.weights[name] for key, name in names.items() if name in self.weights}

    @property
    def options(self) -> dict[str, Any]:
        """The model's options as an editable dictionary; raises ValueError if there are no options."""
        found = self.options_of("model")
        if not found:
            raise ValueError(
                "the checkpoint has no model options (neither args nor cfg); give a checkpoint that "
                "fairseq-train saved."
            )
        return found

    def options_of(self, part: str) -> dict[str, Any]:
        """Return the options of a part, such as the task; in older files, all parts share one dict."""
        args = self.state.get("args")
        return _values(self._cfg.get(part) if args is None else args)

    def name(self, part: str) -> str:
        """Return the name of the architecture, task, criterion or optimizer, or "" if it is missing."""
        options, is_flat = self.options_of(part), self.state.get("args") is not None
        own = None if is_flat else options.get("_name")  # In flat options, _name is the model's name.
        return str(own or options.get(PARTS[part]) or "")

    def rename(self, part: str, name: str) -> None:
        """Change the name of the architecture, task, criterion or optimizer in the checkpoint."""
        _values(self._cfg.get(part))["_name"] = name
        # The model options of an encoder-decoder are a flat copy of the whole configuration.
        for flat in (self.state.get("args"), *self._cfg.values()):
            if isinstance(flat, argparse.Namespace) and hasattr(flat, PARTS[part]):
                setattr(flat, PARTS[part], name)

    def drop(self, keys: Collection[str]) -> None:
        """Remove options from the configuration in the checkpoint."""
        for options in map(self.options_of, PARTS):
            for key in keys:
                options.pop(key, None)

    def use_plain_options(self) -> None:
        """Convert the model's options to a dictionary; without this plugin, torch.load rejects a Namespace.

        BART's options stay a Namespace, because fairseq reads BART's task name only from a Namespace.
        """
        model = self._cfg.get("model")
        if isinstance(model, argparse.Namespace) and "bart" not in str(getattr(model, "arch", "")):
            self._cfg["model"] = vars(model)

    @property
    def _cfg(self) -> dict[str, Any]:
        return self.state.get("cfg") or {}

    def restart(self, weights: Mapping[str, Any] | None = None) -> None:
        """Remove optimizer state, meters and data position; replace the weights if `weights` is given.

        A training run from a restarted checkpoint begins as with --finetune-from-model.
        """
        before = self.state.get("extra_state") or {}
        kept = {dictionaries.KEY: before[dictionaries.KEY]} if dictionaries.KEY in before else {}
        self.state.pop("last_optimizer_state", None)
        self.state["optimizer_history"] = self.state.get("optimizer_history") or [NO_HISTORY]
        self.state["extra_state"] = {"train_iterator": dict(START), **kept}
        if weights is not None:
            self.state["model"] = dict(weights)

    def write(self, output: Path) -> None:
        """Write the checkpoint as one file; raise ValueError if the file cannot be written."""
        unbind(self.state)
        write_all([(output, self.state)])


def drop_retired(state: Mapping[str, Any], path: str | Path) -> None:
    """Remove the options in `RETIRED` from a checkpoint, in place, and log the removed options."""
    found = set()
    for part in (state.get("args"), *(state.get("cfg") or {}).values()):
        options = vars(part) if isinstance(part, argparse.Namespace) else part
        if isinstance(options, MutableMapping):
            for key in RETIRED.keys() & options.keys():
                del options[key]
                found.add(key)
    if found:
        reasons = ", ".join(f"{key} ({RETIRED[key]})" for key in sorted(found))
        logger.info("%s has options that no longer exist and are ignored: %s", path, reasons)


def _values(options: Any) -> dict[str, Any]:
    """Return options as a dictionary; changing the dictionary changes the options."""
    if isinstance(options, argparse.Namespace):
        return vars(options)
    return options if isinstance(options, dict) else {}


def write_all(contents: Iterable[tuple[Path, Any]]) -> None:
    """Write several checkpoint files, and rename all to their final names when all are complete.

    Raises:
        ValueError: a checkpoint could not be written, for example because the disk is full.
    """
    path = Path()
    try:
        with contextlib.ExitStack() as stack:
            for path, content in contents:
                temporary = stack.enter_context(renamed_when_whole(path))
                with progress(f"writing {printable(path.name)}", _bytes(content), "B") as advance:
                    atomic_save.write(content, temporary, advance)
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error


def _bytes(content: Any) -> int:
    """Return the total size of all tensors in nested containers in bytes; shared storages count once."""
    storages = [t.untyped_storage() for _, _, t in walk(content) if isinstance(t, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def not_written(output: Path, error: Exception) -> ValueError:
    """Return a ValueError for a file that could not be written, with the system's reason in the message."""
    reason = atomic_save.reason_of(error)
    return ValueError(
        f"--output {output} could not be written ({reason}); free disk space, or give another path."
    )
