"""Names and options of checkpoints of Tutel's fairseq example (examples/fairseq_moe).

Its decoder layers have a `moe_ffn`: top-2 with an fp32 gate and noise, no dropping, one expert per rank, no
activation in an expert. It has no options: everything is fixed, or set in the environment.
"""

import re
from collections.abc import Iterable
from typing import Any

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.names import is_language_model, use_moe_names

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


def to_ours(saved: SavedModel, layers: dict[str, int], activation: str) -> list[str]:
    """Set our names and options in a checkpoint of the example, in place; return notes.

    Args:
        saved: rank 0's checkpoint with all experts, and our names within layers.
        layers: number of experts of each of Tutel's layers, by its prefix.
        activation: activation of the experts.

    Raises:
        ValueError: no model here computes the same.
    """
    for prefix in layers:
        if not re.fullmatch(r"decoder\.layers\.\d+\.moe_ffn\.", prefix):
            raise ValueError(
                f"--input-prefix has the MoE layer {prefix.rstrip('.')} in a fairseq checkpoint, where "
                "Tutel's example has decoder.layers.N.moe_ffn; save its weights as a file of their own "
                "and give that."
            )
    model: dict[str, Any] = {}
    for name, tensor in saved.weights.items():
        layer, _, norm = name.partition("ffn_layernorm.")
        if f"{layer}moe_ffn." in layers:  # here the norm belongs to the experts
            name = f"{layer}moe_ffn.experts.hidden_layer_norm.{norm}"
        model[name.replace(".moe_ffn.", ".fc1.")] = tensor
    saved.state["model"] = model
    arch, options = saved.name("model"), saved.options
    use_moe_names(saved)
    freq = _frequency(layers, options)
    if len(set(layers.values())) > 1:
        raise ValueError("--input-prefix has layers of different numbers of experts; give one model's.")
    has_dense = freq > 1 or not is_language_model(arch)
    dense = options.get("activation_fn", "relu")
    if has_dense and dense != activation:
        raise ValueError(
            f"--expert-activation is {activation}, as in Tutel's example, but the dense layers have "
            f"{dense}, and here all layers have one activation; give --expert-activation {dense} if the "
            "experts were trained with it."
        )
    sides = {} if is_language_model(arch) else {"encoder_moe_freq": 0, "decoder_moe_freq": freq}
    count = str(next(iter(layers.values())))
    options.update(FIXED, activation_fn=activation, moe_freq=freq, moe_expert_count=count, **sides)
    notes = [
        "the weight of the balance loss was in the environment (L_AUX_WT); give a training run "
        "--moe-gate-loss-wt, with --moe-gate-loss-combine-method sum."
    ]
    if saved.state.pop(OPTIMIZER, None):
        notes.append(
            "the optimizer state is left out: it is that of rank 0; start from the file by "
            "--finetune-from-model, or by --restore-file with --reset-optimizer."
        )
    return notes


def _frequency(layers: Iterable[str], options: dict[str, Any]) -> int:
    """Return n, where every n-th decoder layer is a MoE layer."""
    found = sorted(int(prefix.split(".")[2]) for prefix in layers)
    count = int(options.get("decoder_layers") or found[-1] + 1)
    freq = found[0] + 1
    if found != [i for i in range(count) if (i + 1) % freq == 0]:
        raise ValueError(
            f"--input-prefix has experts in the decoder layers {found} of {count}, which no --moe-freq "
            "gives; give the files of one training run of Tutel's example."
        )
    return freq
