"""Converts a model with Tutel's moe_layer from one file per rank to a single file.

- A state dict becomes a state dict for the same model with fairseq_tutel.moe_layer.
- A checkpoint of Tutel's fairseq example becomes a checkpoint of moe_transformer_lm or moe_transformer.

The converted weights are bit-identical.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.files import read_file
from fairseq_tutel.checkpoint.foreign import refuse_weights
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.configs import Tensors, freq_of, print_notes, use_moe_variants
from fairseq_tutel.convert.tutel_layer import COUNT, our_layer

INPUT = "PREFIX"  # Error messages call the input PREFIX.
# fairseq_tutel's options for the MoE settings of Tutel's example, which has no flags for them.
FIXED = {
    "moe_top_k": 2,
    "moe_top1_expert": False,
    "moe_capacity_factor": 0.0,
    "moe_eval_capacity_factor": 0.0,
    "moe_gate_noise": 1.0,
    "no_moe_gating_use_fp32": False,
    "moe_normalize_gate": "before",
    "moe_balance_loss": "gshard:1",
    "moe_expert_ffn_dim": 0,
}


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert tutel`."""
    saved, notes = read(inputs, arguments.namespace, arguments.expert_activation)
    print_notes(notes)
    saved.write(output)
    return ""


def inputs_of(arguments: argparse.Namespace) -> list[Path]:
    """Return each rank's file: fill in {rank} and {size} of the pattern, or append RANK-of-SIZE."""
    pattern, size = arguments.prefix, arguments.input_size
    if size < 1:
        raise ValueError(
            f"--input-size is {size}; give the number of ranks that saved the model, at least 1."
        )
    if size == 1 and Path(pattern).is_file():
        return [Path(pattern)]
    if "{rank}" not in pattern:
        pattern += "{rank}-of-{size}"
    pattern = pattern.replace("{size}", str(size))
    return [Path(pattern.replace("{rank}", str(rank))) for rank in range(size)]


def read(
    paths: list[Path], namespace: str | None = None, activation: str = "linear"
) -> tuple[SavedModel, list[str]]:
    """Load the files of all ranks of a Tutel model as one checkpoint, and return notes to print.

    Args:
        paths: the file of each rank.
        namespace: the keys that lead to the weights in a file, joined by /; None means `model` if this key
            exists.
        activation: the experts' activation in Tutel's fairseq example, whose checkpoints do not record it.

    Raises:
        ValueError: a file is missing or corrupt, or the files belong to different models.
    """
    states = [read_file(path, INPUT) for path in paths]
    state = states[0]
    if namespace is None:
        has_model = isinstance(state, dict) and isinstance(state.get("model"), dict)
        namespace = "model" if has_model else ""
    ranks = [_weights_in(*each, namespace) for each in zip(states, paths, strict=True)]
    for path, weights in zip(paths, ranks, strict=True):
        for name in ranks[0].keys() ^ weights.keys():
            lacking = path if name in ranks[0] else paths[0]
            raise ValueError(
                f"{INPUT} names {lacking}, which lacks the weight {name}; give the files of one model."
            )
    counts = _expert_counts(ranks)
    is_example = namespace == "model" and bool(state.get("cfg") or state.get("args"))
    weights, notes = _joined(ranks, counts, "" if is_example else "moe.")
    if is_example:
        saved = SavedModel(dict(state), flag=INPUT)
        return saved, notes + _from_example(saved, weights, counts, activation)
    content: dict[str, Any] = weights
    for key in reversed([key for key in namespace.split("/") if key]):
        content = {key: content}
    return SavedModel(content), notes + [f"everything except {namespace} is left out."] * bool(namespace)


def _weights_in(state: Any, path: Path, namespace: str) -> Tensors:
    found = state
    for key in filter(None, namespace.split("/")):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not any(torch.is_tensor(value) for value in found.values()):
        raise ValueError(
            f"{INPUT} names {path}, which holds no weights{f' under {namespace}' if namespace else ''}; "
            "set --namespace to the keys that lead to the weights, joined by /, such as model/weights."
        )
    refuse_weights(found, f"{INPUT} {path}")
    return found


def _expert_counts(ranks: list[Tensors]) -> dict[str, int]:
    """Return a dictionary from the name prefix of each Tutel layer to the layer's number of experts."""
    names = [name for name in ranks[0] if name.rpartition(".")[2] == COUNT]
    if not names:
        raise ValueError(f"{INPUT} has no Tutel layer (no {COUNT}); give files that Tutel saved.")
    for name in names:
        if len({int(rank[name]) for rank in ranks}) > 1:
            raise ValueError(f"{INPUT} has files that differ in {name}; give the files of one model.")
    return {name.removesuffix(COUNT): int(ranks[0][name]) for name in names}


def _joined(ranks: list[Tensors], counts: dict[str, int], within: str) -> tuple[Tensors, list[str]]:
    """Join the weights of all ranks of a Tutel model, and rename the weights for fairseq_tutel.

    The function also returns a note if weights other than experts differ between ranks. Weights outside
    MoE layers are taken from rank 0. In a MoE layer's weight names, `within` follows the layer's prefix.
    """
    weights: Tensors = {}
    done: set[str] = set()
    differing: list[str] = []
    for name, tensor in ranks[0].items():
        own = ((p, name.removeprefix(p)) for p in counts if name.startswith(p))
        fits = (p for p, part in own if part == COUNT or part.startswith(("experts.", "gate")))
        prefix = next(fits, None)
        if prefix is None:
            weights[name] = tensor
        elif prefix not in done:
            done.add(prefix)
            try:
                found = our_layer(ranks, prefix, counts[prefix])
            except ValueError as error:
                raise ValueError(
                    f"{INPUT} has the layer {prefix.rstrip('.') or 'at the top'}, which {error}; give the "
                    "files that all ranks of one model saved."
                ) from error
            weights |= {prefix + within + key: value for key, value in found.items()}
        alike = torch.is_tensor(tensor) and not name.startswith(f"{prefix}experts.")
        if alike and any(not torch.equal(tensor, rank[name]) for rank in ranks[1:]):
            differing.append(name)
    if not differing:
        return weights, []
    what = f"{len(differing)} weights differ between ranks, such as {differing[0]}"
    return weights, [f"{what}; the weights of rank 0 are used."]


def _from_example(
    saved: SavedModel, weights: Tensors, counts: dict[str, int], activation: str
) -> list[str]:
    """Convert rank 0's checkpoint of Tutel's fairseq example in place; return notes to print.

    In Tutel's example, decoder layers have a MoE layer named `moe_ffn`. It is top-2 and dropless, with a
    noisy fp32 gate and one expert per rank. The experts of Tutel's example have no activation.
    """
    for prefix in counts:
        if not re.fullmatch(r"decoder\.layers\.\d+\.moe_ffn\.", prefix):
            raise ValueError(
                f"{INPUT} names a fairseq checkpoint with the MoE layer {prefix.rstrip('.')}, but fairseq "
                "checkpoints are supported only if all MoE layers are named decoder.layers.N.moe_ffn, as "
                "in Tutel's example; save only the model's state dict to a file, and give that file."
            )
    model: Tensors = {}
    for name, tensor in weights.items():
        layer, _, norm = name.partition("ffn_layernorm.")
        if f"{layer}moe_ffn." in counts:
            name = f"{layer}moe_ffn.experts.hidden_layer_norm.{norm}"
        model[name.replace(".moe_ffn.", ".fc1.")] = tensor
    saved.restart(model)
    use_moe_variants(saved)
    options = saved.options
    found = sorted(int(prefix.split(".")[2]) for prefix in counts)
    layers = int(options.get("decoder_layers") or found[-1] + 1)
    freq = freq_of(found, layers)
    if freq is None or len({*counts.values()}) > 1:
        raise ValueError(
            f"{INPUT} has {[*counts.values()]} experts in the decoder layers {found} of {layers}, which no "
            "--moe-freq selects; give the files of one training run of Tutel's example."
        )
    has_encoder, dense = "encoder_layers" in options, options.get("activation_fn", "relu")
    if (freq > 1 or has_encoder) and dense != activation:
        raise ValueError(
            f"--expert-activation is {activation}, but the dense layers have {dense}, and all layers of a "
            f"fairseq_tutel model have the same activation; give --expert-activation {dense} if the "
            "experts were trained with it."
        )
    options.update(FIXED, activation_fn=activation, moe_freq=freq)
    options["moe_expert_count"] = str(next(iter(counts.values())))
    if has_encoder:
        options.update(encoder_moe_freq=0, decoder_moe_freq=freq)
    return [
        "the weight of the balance loss was set by the environment variable L_AUX_WT; for training, give "
        "it as --moe-gate-loss-wt, with --moe-gate-loss-combine-method sum."
    ]
