"""Writes a random model of the form of NLLB-MoE, one layer of experts at a time.

The experts' integers are random bytes: their speed does not depend on their values. Experts are never in
memory together.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, digest, write_pieces
from fairseq_tutel.convert.configs import counts_text
from fairseq_tutel.convert.released import from_hf
from fairseq_tutel.convert.released.families.nllb_moe import NLLB_MOE, PARTS
from fairseq_tutel.convert.released.table import Setup
from fairseq_tutel.convert.released.vocabulary import Vocabulary
from fairseq_tutel.parallel.groups import Slice

LANGUAGES = ("aaa_Latn", "bbb_Latn")
DTYPE = torch.bfloat16  # of all weights that are not quantized
SIZES = "sizes.json"  # the file of a model's `Shape`


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model; the defaults are those of NLLB-MoE-54B.

    Attributes:
        layers: layers of the encoder, and of the decoder; every `freq`-th layer has experts.
        encoder_experts: experts of a MoE layer of the encoder.
        decoder_experts: experts of a MoE layer of the decoder.
        vocabulary: rows of the embedding table.
        expert_dtype: int8 or int4.
    """

    model_dim: int = 2048
    hidden_dim: int = 8192
    layers: int = 24
    freq: int = 4
    heads: int = 16
    encoder_experts: int = 128
    decoder_experts: int = 128
    vocabulary: int = 256206
    expert_dtype: str = "int4"

    @property
    def num_experts(self) -> int:
        """The number of experts of all layers."""
        return self.layers // self.freq * (self.encoder_experts + self.decoder_experts)

    @property
    def expert_weights(self) -> int:
        """The number of weights of an expert, without biases."""
        return 2 * self.model_dim * self.hidden_dim

    @property
    def expert_bytes(self) -> int:
        """The stored bytes of an expert, without biases."""
        return sum(_stack(self, name, 1, Path()).stored_bytes for name in ("fc1_weight", "fc2_weight"))

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        sides = ("encoder", "decoder")
        return {
            "model_type": "nllb-moe", "d_model": self.model_dim, "vocab_size": self.vocabulary,
            "num_experts": max(self.encoder_experts, self.decoder_experts),
            **{f"{side}_layers": self.layers for side in sides},
            **{f"{side}_sparse_step": self.freq for side in sides},
            **{f"{side}_ffn_dim": self.hidden_dim for side in sides},
            **{f"{side}_attention_heads": self.heads for side in sides},
        }  # fmt: skip


def write(shape: Shape, folder: Path) -> None:
    """Write a sharded checkpoint and its dictionaries to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config()
    options = NLLB_MOE.read_options(config)
    layers = list(dict.fromkeys(name.partition(".fc1.")[0] for name in NLLB_MOE.stacks(options)))
    counts = {
        layer: shape.encoder_experts if layer.startswith("enc") else shape.decoder_experts
        for layer in layers
    }
    options["moe_expert_count"] = counts_text([*counts.values()])
    symbols = [f"w{i}" for i in range(shape.vocabulary - 4 - len(LANGUAGES))]
    symbols += [f"__{language}__" for language in LANGUAGES]
    links = {f"dict.{language}.txt": "dict.txt" for language in LANGUAGES}
    text = "".join(f"{symbol} 1\n" for symbol in symbols)
    vocabulary = Vocabulary({"dict.txt": text}, links, [*LANGUAGES])
    torch.manual_seed(1)
    weights = {}
    for row in NLLB_MOE.rows(options):
        experts = counts.get(row.ours[0].partition(".fc1.")[0], 0)
        weights |= dict.fromkeys(row.ours, _dense(row.ours[0], shape, experts))
    saved = from_hf.checkpoint(NLLB_MOE, Setup(options, config, "", [*LANGUAGES]), vocabulary, weights)
    for name, stack in _write_experts(shape, counts, folder).items():
        saved.weights[name] = stack.record()
    (folder / SIZES).write_text(json.dumps(asdict(shape)))
    saved.write(folder / from_hf.CHECKPOINT)
    from_hf.write_vocabulary(vocabulary, folder, folder)


def _dense(name: str, shape: Shape, experts: int) -> Tensor:
    """Return a random tensor that does not belong to an expert."""
    dim, hidden = shape.model_dim, shape.hidden_dim
    if name.endswith("bias"):
        return torch.zeros(hidden if ".fc1." in name else dim, dtype=DTYPE)
    if "norm" in name:
        return torch.ones(dim, dtype=DTYPE)
    sizes = {"embed": (shape.vocabulary, dim), ".gate.": (experts, dim), ".fc1.": (hidden, dim)}
    sizes[".fc2."] = (dim, hidden)
    size = next((size for part, size in sizes.items() if part in name), (dim, dim))
    return torch.empty(size, dtype=DTYPE).normal_(std=size[1] ** -0.5)


def _write_experts(shape: Shape, counts: Mapping[str, int], folder: Path) -> dict[str, ShardedTensor]:
    """Write the experts of each layer to one file; return their stacked tensors by name."""
    written, made = folders.begin(folder), {}
    generator = np.random.default_rng(1)
    for layer, count in counts.items():
        file = f"{layer}.fc1.experts.safetensors"
        stacks = {name: _stack(shape, name, count, folder) for name in PARTS.values()}
        digests: dict[str, str] = {}

        def value(
            key: str, stacks: Mapping[str, ShardedTensor] = stacks, digests: dict[str, str] = digests
        ) -> Tensor:
            found = _random(stacks[key.partition(".")[2]], generator)
            digests[key] = digest(found)
            return found

        layout = {f"{e}.{name}": stack.stored for name, stack in stacks.items() for e in range(count)}
        write_pieces(layout, value, written / file)
        for name, stack in stacks.items():
            keys = [f"{e}.{name}" for e in range(count)]
            pieces = tuple(Piece(file, key, digests[key]) for key in keys)
            made[f"{layer}.fc1.experts.{name}"] = replace(stack, pieces=pieces)
    names = [f"{p.file} {p.key} {p.digest}" for stack in made.values() for p in stack.pieces]
    committed = folders.commit(written, names)
    return {name: replace(stack, folder=committed) for name, stack in made.items()}


def _stack(shape: Shape, name: str, count: int, root: Path) -> ShardedTensor:
    """Return the stacked tensor `name` of a layer with `count` experts, without names of files."""
    dim, hidden = shape.model_dim, shape.hidden_dim
    sizes = {"fc1": (hidden, dim), "fc2": (dim, hidden)}
    fc, _, kind = name.partition("_")
    size = sizes[fc] if kind == "weight" else sizes[fc][:1]
    return ShardedTensor(
        root=root, folder="", shape=(count, *size), dtype=DTYPE, slicing=Slice(),
        pieces=(Piece("", "", ""),) * count,
        expert_dtype=shape.expert_dtype if kind == "weight" else "",
    )  # fmt: skip


def _random(stack: ShardedTensor, generator: np.random.Generator) -> Tensor:
    """Return one expert's tensor as it is stored: random integers with a scale, or zeros."""
    form, (dtype, size) = stack.quantized, stack.stored
    if form is None:
        return torch.zeros(size, dtype=dtype)
    stored = torch.frombuffer(bytearray(generator.bytes(math.prod(size))), dtype=torch.uint8)
    # The integers are uniformly distributed; the weights get the standard deviation of a linear layer.
    integers = 2 ** (8 if form.expert_dtype == "int8" else 4) / math.sqrt(12)
    scales = stored[: form.scale_bytes].view(torch.bfloat16 if form.in_groups else torch.float32)
    scales.fill_(stack.shape[-1] ** -0.5 / integers)
    return stored


if __name__ == "__main__":
    write(Shape(**json.loads(sys.argv[1])), Path(sys.argv[2]))
