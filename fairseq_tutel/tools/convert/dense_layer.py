"""One MoE layer made into a dense feed-forward step: one expert, or several side by side.

E experts, n of them chosen; D model_dim.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.tools.convert.layers import Layer
from fairseq_tutel.tools.convert.moe_file import ROWS, experts_of
from fairseq_tutel.tools.convert.upcycle_layer import sums_to_1


def dense_tensors(
    model: Mapping[str, Tensor],
    layer: Layer,
    config: MoEConfig,
    chosen: Sequence[int],
    weight: float,
) -> dict[str, Tensor]:
    """Return a dense step's tensors by their names within the layer.

    Args:
        model: the state dict.
        layer: which of its layers.
        config: of the layer.
        chosen: ids of the experts.
        weight: of all together; an n-th of it goes into each one's second map.

    Raises:
        ValueError: experts that no dense step of fairseq's can be.
    """
    _refuse(config, layer, len(chosen))
    experts = experts_of(model, layer)
    scale = weight / len(chosen)
    w1s, b1s, w2s, b2s = (
        [experts[name][i] for i in chosen]
        for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    )
    w2s, b2s = ([tensor if scale == 1 else tensor * scale for tensor in of] for of in (w2s, b2s))
    if config.shared_experts:
        shared = f"{layer.step}.beside.shared"
        for name, of in (
            ("fc1.weight", w1s),
            ("fc1.bias", b1s),
            ("fc2.weight", w2s),
            ("fc2.bias", b2s),
        ):
            of.append(model[f"{shared}.{name}"])
    made = {
        "fc1.weight": torch.cat(w1s),
        "fc1.bias": torch.cat(b1s),
        "fc2.weight": torch.cat(w2s, dim=1),
        "fc2.bias": torch.stack(b2s).sum(dim=0),
    }
    for kind in ("weight", "bias") if config.hidden_layer_norm else ():
        made[f"ffn_layernorm.{kind}"] = model[f"{layer.step}.experts.hidden_layer_norm.{kind}"]
    return made


def _refuse(config: MoEConfig, layer: Layer, number: int) -> None:
    if config.expert_type != "ffn":
        raise ValueError(
            f"{layer.label} has experts of the type {config.expert_type} ({label_of('expert_type')}), for "
            "which fairseq has no dense layer; convert dense takes ffn."
        )
    if config.residual:
        raise ValueError(
            f"{layer.label} mixes experts and a dense network token by token ({label_of('residual')}), "
            "which no dense layer can; convert dense takes models without it."
        )
    if config.hidden_layer_norm and (number > 1 or config.shared_experts):
        raise ValueError(
            f"{layer.label} normalises each expert's hidden layer by itself (--scale-fc), which one of "
            "several side by side cannot; choose one in --experts, of a model without shared ones."
        )


def usual_weight(config: MoEConfig) -> float:
    """Return what a token's experts weigh together; 1 where that is a matter of probabilities."""
    return config.routed_scaling_factor if sums_to_1(config) else 1.0


def is_exact(
    model: Mapping[str, Tensor], layer: Layer, config: MoEConfig, chosen: Sequence[int]
) -> bool:
    """Whether a dense step of the usual weight computes what the layer does, in evaluation.

    It does where the weights of a token's experts sum to 1, and experts repeat every p of them: a token
    gets all p kinds alike, since p is 1 or its gate cannot tell them apart, and so does the dense step.
    """
    drops = capacity_of(config, training=False).is_limited
    if not sums_to_1(config) or config.choice == "experts" or config.prescore or drops:
        return False
    return any(
        _repeats(model, layer, config, p)
        for p in range(1, len(chosen) + 1)
        if _are_alike(Counter(i % p for i in chosen), p)
    )


def _are_alike(counts: Counter[int], kinds: int) -> bool:
    return len(counts) == kinds and len(set(counts.values())) == 1


def _repeats(model: Mapping[str, Tensor], layer: Layer, config: MoEConfig, p: int) -> bool:
    """Whether experts repeat every p, and every token chooses runs of p neighbours, of one weight."""
    num_experts = config.num_experts
    if num_experts % p or config.top_k % p:
        return False
    return (p == 1 or _gate_knows_runs_alone(model, layer, config, p)) and all(
        torch.equal(stack[i], stack[i % p])
        for stack in experts_of(model, layer).values()
        for i in range(p, num_experts)
    )


def _gate_knows_runs_alone(
    model: Mapping[str, Tensor], layer: Layer, config: MoEConfig, p: int
) -> bool:
    """Whether the gate gives the p experts of every run of neighbours the same score."""
    kind = config.gate_types[config.gate_index]
    if kind == "hash":
        return p == config.num_experts
    if kind not in ROWS or config.balance_bias:
        return False
    gate = "gate" if config.gate_index == 0 else f"other_gates.{config.gate_index - 1}"
    rows_ED = model[f"{layer.step}.{gate}.{ROWS[kind]}"]
    return torch.equal(rows_ED, rows_ED[::p].repeat_interleave(p, dim=0))


def widened(step: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Return a dense step with hidden units that are 0 and stay 0 behind its own, `width` in all.

    Raises:
        ValueError: a layer norm on the hidden layer, which they would change.
    """
    more = width - len(step["fc1.bias"])
    if more and "ffn_layernorm.weight" in step:
        raise ValueError(
            "--input normalises hidden layers (--scale-fc) of several widths, and all of a dense model's "
            "are equally wide; choose --experts that are."
        )
    return {
        **step,
        "fc1.weight": F.pad(step["fc1.weight"], (0, 0, 0, more)),
        "fc1.bias": F.pad(step["fc1.bias"], (0, more)),
        "fc2.weight": F.pad(step["fc2.weight"], (0, more)),
    }
