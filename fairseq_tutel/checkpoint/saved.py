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

from fairseq_tutel.checkpoint import atomic_save
from fairseq_tutel.checkpoint.files import read_file, walk
from fairseq_tutel.checkpoint.foreign import refuse_malformed
from fairseq_tutel.checkpoint.options import RETIRED
from fairseq_tutel.checkpoint.shards import bind, unbind
from fairseq_tutel.files import printable, renamed_when_whole
from fairseq_tutel.parallel.progress import progress

logger = logging.getLogger(__name__)

# The parts of a configuration, and for each part the key of its name in a flat configuration.
PARTS = {"model": "arch", "task": "task", "criterion": "criterion", "optimizer": "optimizer"}
# The FFN tensors of a dense layer, and the tensors that --scale-fc adds.
DENSE = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
LAYER_NORM = ("ffn_layernorm.weight", "ffn_layernorm.bias")
# The data position at the start of a training run, and an entry of its optimizer history.
START = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
NO_HISTORY = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}

_LAYER = re.compile(
    r"\b(?P<name>(?P<side>encoder|decoder|stages\.\d+)(?P<inner>\.sentence_encoder)?"
    r"\.((transformer_)?layers|blocks)\.(?P<index>\d+))\.fc1\.(?P<what>weight|experts\.)"
)
# Tensors by name. Experts may be `ShardedTensor`s, which support the same indexing.
Weights = dict[str, Any]


@dataclass(frozen=True, order=True)
class Layer:
    """A layer with an FFN or experts. Layers are sorted as in --moe-expert-count, the encoder first."""

    stack: int  # 0 for the encoder, 1 for the decoder; the stage number in Swin
    index: int  # index within the encoder, decoder or stage, from 0
    side: str  # encoder, decoder or, in Swin, stages.N
    name: str  # prefix of the layer's tensors, such as decoder.layers.1
    has_experts: bool

    @property
    def moe(self) -> str:
        """The qualified name of the MoE layer within the model; it replaces fairseq's fc1."""
        return f"{self.name}.fc1"

    @property
    def label(self) -> str:
        """The layer's name in logs and options, such as decoder_1."""
        return layer_label(self.moe)


def layer_label(name: str) -> str:
    """Convert the qualified name of a MoE layer to its short name in logs and options.

    Examples: decoder.layers.3.fc1 -> decoder_3, stages.2.blocks.1.fc1 -> stages_2_1. If there is one model
    per language pair, the label begins with the pair: de-en_decoder_3.
    """
    parts = name.removeprefix("models.").split(".")
    names = 2 if name.startswith("models.") else 1
    return "_".join([*parts[:names], *filter(str.isdecimal, parts[names:-1])])


def layers_of(weights: Iterable[str], within: bool = False) -> list[Layer]:
    """Return a sorted list of the layers that have an FFN or experts, from the names of the weights.

    `within` adds the layers of models that are inside another model.
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
    """An open fairseq checkpoint. Its tensors stay on disk until they are read; edits change `state`."""

    def __init__(self, state: dict[str, Any], path: Path | None = None, flag: str = "INPUT") -> None:
        self.state, self.path, self.flag = state, path, flag

    @classmethod
    def open(cls, path: Path, flag: str = "INPUT", keep_shards: bool = False) -> "SavedModel":
        """Open the checkpoint at `path`, a value of the flag `flag`; raise ValueError for a bad file.

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
        """The layers of the model that have an FFN or experts, in model order."""
        return layers_of(self.weights)

    def stacks(self, layer: Layer) -> Weights:
        """Return the stacked tensors [E, ...] of a layer's experts, keyed by name within an expert."""
        prefix = f"{layer.moe}.experts."
        own = {k.removeprefix(prefix): t for k, t in self.weights.items() if k.startswith(prefix)}
        # Names with a dot belong to modules that all experts share, such as a layer norm.
        return {name: tensor for name, tensor in own.items() if "." not in name}

    def expert(self, layer: Layer, expert_id: int) -> dict[str, Tensor]:
        """Return the tensors of one expert of a layer; `expert_id` is the expert's global ID."""
        return {name: stack[expert_id] for name, stack in self.stacks(layer).items()}

    def num_experts(self, layer: Layer) -> int:
        """Return the number of experts of a layer."""
        return int(next(iter(self.stacks(layer).values())).shape[0])

    def dense_ffn(self, layer: Layer) -> dict[str, Tensor]:
        """Return a dictionary of the tensors of a layer's dense FFN, with keys such as "fc1.weight".

        Raises:
            ValueError: a tensor is missing.
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
        """The model's options as an editable dictionary. Raises ValueError if there are none."""
        found = self.options_of("model")
        if not found:
            raise ValueError(
                "the checkpoint has no model options (neither args nor cfg); give a checkpoint that "
                "fairseq-train saved."
            )
        return found

    def options_of(self, part: str) -> dict[str, Any]:
        """Return the options of the model, task, criterion or optimizer; older files have one set."""
        args = self.state.get("args")
        return _values(self._cfg.get(part) if args is None else args)

    def name(self, part: str) -> str:
        """Return the name of the architecture, task, criterion or optimizer; "" if there is none."""
        options, is_flat = self.options_of(part), self.state.get("args") is not None
        own = None if is_flat else options.get("_name")  # in flat options, _name belongs to the model
        return str(own or options.get(PARTS[part]) or "")

    def rename(self, part: str, name: str) -> None:
        """Change the name of the architecture, task, criterion or optimizer in the checkpoint."""
        _values(self._cfg.get(part))["_name"] = name
        # An encoder-decoder's options are a flat copy of the whole configuration.
        for flat in (self.state.get("args"), *self._cfg.values()):
            if isinstance(flat, argparse.Namespace) and hasattr(flat, PARTS[part]):
                setattr(flat, PARTS[part], name)

    def drop(self, keys: Collection[str]) -> None:
        """Remove the options with these keys from the checkpoint's configuration."""
        for options in map(self.options_of, PARTS):
            for key in keys:
                options.pop(key, None)

    def use_plain_options(self) -> None:
        """Convert the model's options to a dictionary: without the plugin, torch cannot load a Namespace.

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

        A training run then starts as with --finetune-from-model.
        """
        self.state.pop("last_optimizer_state", None)
        self.state["optimizer_history"] = self.state.get("optimizer_history") or [NO_HISTORY]
        self.state["extra_state"] = {"train_iterator": dict(START)}
        if weights is not None:
            self.state["model"] = dict(weights)

    def write(self, output: Path) -> None:
        """Write the checkpoint as one file; see `write_all` for errors."""
        unbind(self.state)
        write_all([(output, self.state)])


def drop_retired(state: Mapping[str, Any], path: str | Path) -> None:
    """Remove the options of `RETIRED` from a checkpoint, in place, and log them in one line."""
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
    """Return options as a dictionary; edits of the dictionary change the options."""
    if isinstance(options, argparse.Namespace):
        return vars(options)
    return options if isinstance(options, dict) else {}


def write_all(contents: Iterable[tuple[Path, Any]]) -> None:
    """Write several checkpoint files; give them their final names only after all are complete.

    Raises:
        ValueError: a file could not be written, for example because the disk is full.
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
    """Return the bytes of all tensors in nested containers; storages that tensors share count once."""
    storages = [t.untyped_storage() for _, _, t in walk(content) if isinstance(t, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def not_written(output: Path, error: Exception) -> ValueError:
    """Return a ValueError for a file that could not be written; its message has the system's reason."""
    reason = atomic_save.reason_of(error)
    return ValueError(
        f"--output {output} could not be written ({reason}); free disk space, or give another path."
    )
