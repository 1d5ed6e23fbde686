"""Checkpoints of Tutel's fairseq example (examples/fairseq_moe): names and options, theirs and ours.

Its decoder layers have a `moe_ffn`: top-2 with an fp32 gate and noise, nothing dropped, one expert on each
rank, no activation between an expert's maps. It has no options: all is fixed, or in the environment.
"""

import re
from collections.abc import Iterable
from typing import Any

from fairseq_tutel.convert.names import (
    is_language_model,
    model_options,
    name_of,
    rename_to_ours,
)

OPTIMIZER = "last_optimizer_state"
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


def to_ours(state: dict[str, Any], layers: dict[str, int], activation: str) -> list[str]:
    """Give a checkpoint of the example our names and options, in place; return what is different.

    Args:
        state: rank 0's, with all experts, and names within layers that are ours.
        layers: prefix of every layer of Tutel's, and its experts.
        activation: of the experts.

    Raises:
        ValueError: no model of ours computes the same.
    """
    for prefix in layers:
        if not re.fullmatch(r"decoder\.layers\.\d+\.moe_ffn\.", prefix):
            raise ValueError(
                f"--input-prefix has the MoE layer {prefix.rstrip('.')} in a fairseq checkpoint, where "
                "Tutel's example has decoder.layers.N.moe_ffn; save its weights as a file of their own "
                "and give that."
            )
    model: dict[str, Any] = {}
    for name, tensor in state["model"].items():
        layer, _, norm = name.partition("ffn_layernorm.")
        if f"{layer}moe_ffn." in layers:  # the norm within experts is theirs here
            name = f"{layer}moe_ffn.experts.hidden_layer_norm.{norm}"
        model[name.replace(".moe_ffn.", ".fc1.")] = tensor
    state["model"] = model
    arch, options = name_of(state, "model"), model_options(state)
    rename_to_ours(state, "--input-prefix")
    freq = _frequency(layers, options)
    if len(set(layers.values())) > 1:
        raise ValueError(
            "--input-prefix has layers of different numbers of experts; give one model's."
        )
    has_dense = freq > 1 or not is_language_model(arch)
    dense = options.get("activation_fn", "relu")
    if has_dense and dense != activation:
        raise ValueError(
            f"--expert-activation is {activation}, as Tutel's example leaves its experts, but the dense "
            f"layers have {dense}, and here all have one; give --expert-activation {dense} if the experts "
            "were trained with it."
        )
    sides = {} if is_language_model(arch) else {"encoder_moe_freq": 0, "decoder_moe_freq": freq}
    count = str(next(iter(layers.values())))
    options.update(FIXED, activation_fn=activation, moe_freq=freq, moe_expert_count=count, **sides)
    notes = [
        "the weight of the balance loss stood in the environment (L_AUX_WT); give a training "
        "--moe-gate-loss-wt, with --moe-gate-loss-combine-method sum."
    ]
    if state.pop(OPTIMIZER, None):
        notes.append(
            "the optimizer state is left out: it is rank 0's alone; start from the file by "
            "--finetune-from-model, or by --restore-file with --reset-optimizer."
        )
    return notes


def _frequency(layers: Iterable[str], options: dict[str, Any]) -> int:
    """Return the n of every n-th decoder layer being a MoE layer."""
    found = sorted(int(prefix.split(".")[2]) for prefix in layers)
    count = int(options.get("decoder_layers") or found[-1] + 1)
    freq = found[0] + 1
    if found != [i for i in range(count) if (i + 1) % freq == 0]:
        raise ValueError(
            f"--input-prefix has experts in the decoder layers {found} of {count}, which no --moe-freq "
            "gives; give the files of one training of Tutel's example."
        )
    return freq
