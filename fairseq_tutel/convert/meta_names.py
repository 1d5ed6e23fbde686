"""What Meta's moe branch of fairseq calls what we have: tables of weights and options, read both ways.

Most options have the same names (flags keep Meta's); what stands here differs in name, form or default.
E experts, W ranks.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from fairseq_tutel.moe.config import options_of
from fairseq_tutel.moe.options import flag_of, plain
from fairseq_tutel.convert.optimizer_state import SHARED, trained
from fairseq_tutel.convert.names import Options, our_defaults

# Ours within a layer's fc1 -> Meta's within its moe_layer, in the order of both; {} is a local number.
OUR_GATE, OUR_FC1, GATE = ".fc1.gate.weight", ".fc1.experts.fc1_weight", ".moe_layer.gate.wg.weight"
EXPERTS = {
    f".fc1.experts.{part}_{kind}": f".moe_layer.experts.{{}}.{part}.{kind}"
    for part in ("fc1", "fc2")
    for kind in ("weight", "bias")
}
WITH_GATE = re.compile(r"\.fc1\.(?!(?:weight|bias)$)")  # our names of what comes with a gate
# Of the shared file: gates, and every weight of stock fairseq's, the same in Meta's branch.
STOCK = re.compile(
    r"(?:encoder|decoder)\.(?:"
    r"version|embed_tokens\..+|embed_positions\.(?:weight|_float_tensor)"
    r"|(?:layernorm_embedding|layer_norm)\.(?:weight|bias)"
    r"|(?:project_in_dim|project_out_dim|output_projection)\.weight|adaptive_softmax\..+"
    r"|layers\.\d+\.(?:(?:self_attn|encoder_attn)\.(?:(?:[kqv]|out)_proj\.(?:weight|bias)|bias_[kv])"
    r"|(?:self_attn_layer_norm|encoder_attn_layer_norm|final_layer_norm|fc1|fc2)\.(?:weight|bias)"
    r"|moe_layer\.gate\.wg\.weight)"
    r")|decoder\.layers\.\d+\.attn_ln\.(?:weight|bias)"
)


class Row(NamedTuple):
    """A weight in one of Meta's files.

    Attributes:
        file: of which rank, or SHARED.
        theirs: Meta's name.
        ours: our name of it, or of all experts' [E, …].
        expert: its number among all; None where it is no expert's.
    """

    file: int
    theirs: str
    ours: str
    expert: int | None


def table(names: Iterable[str], experts: int, ranks: int) -> list[Row]:
    """Return a row for each weight in Meta's files, in the order of Meta's model and of ours.

    Where there are more ranks than experts, every E neighbours exchange tokens and hold all experts once.

    Args:
        names: of our model, or of Meta's shared file.
        experts: E.
        ranks: W, a divisor or a multiple of E.
    """
    rows, local = [], max(1, experts // ranks)
    for name in names:
        layer = name.removesuffix(OUR_GATE).removesuffix(GATE)
        if layer == name:
            rows += [Row(SHARED, name, name, None)] * (not WITH_GATE.search(name))
            continue
        rows.append(Row(SHARED, layer + GATE, layer + OUR_GATE, None))
        rows += [
            Row(i // local, layer + theirs.format(i % local), layer + ours, i % experts)
            for i in range(max(experts, ranks))
            for ours, theirs in EXPERTS.items()
        ]
    return rows


def numbers(rows: list[Row], shared: dict[str, Tensor]) -> dict[str, int]:
    """Return Meta's names of the parameters of one rank's model, and their numbers in its optimizer."""
    names = [row.theirs for row in rows if row.file in (0, SHARED)]
    return {name: i for i, name in enumerate(trained(names, shared.__getitem__))}


def _refuse(option: str, value: Any) -> NoReturn:
    raise ValueError(
        f"the model was trained with {option} {value}, which Meta's layer has no counterpart of; convert "
        "a model without it."
    )


def _eval_fraction(ours: Options) -> float:
    """Return Meta's fraction for our evaluation; 1 drops nothing, since no expert gets a token twice.

    Raises:
        ValueError: a capacity that Meta's evaluation cannot have.
    """
    fraction = float(ours["moe_eval_capacity_token_fraction"])
    if fraction > 0:
        return fraction
    key = "moe_capacity_factor" if fraction < 0 else "moe_eval_capacity_factor"
    factor = abs(float(ours[key]))
    if factor not in (0, 1):
        _refuse(f"{flag_of(key)}, which its evaluation goes by,", ours[key])
    return 1.0 if factor == 0 else -1.0


BEFORE, BPR = "moe_normalize_gate_prob_before_dropping", "moe_batch_prioritized_routing"
# Option of both -> Meta's default, what Meta's value is here, and Meta's value from all of ours.
OPTIONS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Options], Any]]] = {
    "moe_top1_expert": (False, bool, lambda o: o["moe_top_k"] == 1),
    "moe_gating_use_fp32": (False, bool, lambda o: not o["no_moe_gating_use_fp32"]),
    BEFORE: (False, bool, lambda o: o["moe_normalize_gate"] == "before"),
    BPR: (False, bool, lambda o: o["moe_top_k"] == 2 and (o[BPR] or o["moe_drop_policy"] == "bpr")),
    "moe_second_expert_policy": ("sampling", str, lambda o: o["moe_second_expert_policy"]),
    # Meta's capacity is as in training where the fraction is 0 or below; ours then has none at 0.
    "moe_eval_capacity_token_fraction": (0.25, lambda v: v if v > 0 else -1.0, _eval_fraction),
    # Two names of Meta's for one number: its ranks of an exchange.
    "moe_normalize_expert_grad": (
        "world_size",
        lambda v: "sqrt_world_size" if str(v).startswith("sqrt") else "world_size",
        lambda o: o["moe_normalize_expert_grad"],
    ),
}
# Option of ours alone -> what it is in a model of Meta's, from those of both.
OURS_ALONE: dict[str, Callable[[Options], Any]] = {
    "moe_top_k": lambda o: 1 if o["moe_top1_expert"] else 2,
    "no_moe_gating_use_fp32": lambda o: not o["moe_gating_use_fp32"],
    "moe_normalize_gate": lambda o: "before" if o[BEFORE] else "after",
    # Meta's capacity in training is that of a factor of 1, with padding counted in.
    "moe_capacity_factor": lambda o: 1.0,
    "moe_balance_loss": lambda o: "gshard:1",
}

# Option of Meta's -> why a model with it cannot be opened here.
REFUSED = {
    "moe_cmr": "its gate between dense and sparse layers has no counterpart",
    "alternate_ffn_embed_dim": "its alternate layers are dense ones of another width",
    "alternate_decoder_ffn_embed_dim": "its alternate layers are dense ones of another width",
    "base_layers": "BASE layers are another kind of experts",
    "scale_fc": "Meta's experts have no such norm, while its dense layers have one",
    "scale_heads": "stock fairseq lays the scaled heads out in another order",
    "scale_heads_inside": "stock fairseq scales no heads within the attention",
    "scale_resids": "Meta's MoE layers have no such scale, while its dense layers have one",
    "alibi": "stock fairseq has no ALiBi",
    "decoder_learned_sinusoidal": "stock fairseq has no such positions",
    "use_stable_embedding": "stock fairseq has no such embedding",
    "quant_noise_pq": "quantization noise does not reach experts here",
    "quant_noise_scalar": "quantization noise does not reach experts here",
}
# Option of Meta's -> what is different without it. Where the model computes the same, nothing is said.
LEFT_OUT = {
    "moe_local_drop": "a training from here always exchanges rows",
    "no_emb_dropout": "a training from here drops embeddings by --dropout",
    "dummy_a2a": "rows are always exchanged here",
    "moe_eval_capacity_max_seqlen": "the evaluation capacity counts the tokens that there are",
}
# Options of stock fairseq that Meta's loader refuses by their names, even where they are off.
NOT_META_S = (
    "scale_fc", "scale_attn", "scale_heads", "scale_resids", "decoder_xformers_att_config",
)  # fmt: skip
# Our option that counts in training alone, where it is said, not refused -> the values that are Meta's.
IN_TRAINING: dict[str, tuple[Any, ...]] = {
    "moe_capacity_factor": (1, -1),
    "moe_min_capacity": (0,),
    "moe_capacity_multiple": (1,),
    "moe_drop_policy": ("position", "bpr"),
    "moe_rsample": (False, None),
    "moe_sinkhorn": (False, None),
    "moe_gate_noise": (0,),
    "moe_input_jitter": (0,),
    "moe_input_dropout": (0,),
    "moe_balance_loss": ("gshard", "gshard:1", "switch", "switch:1"),
}


def from_meta(options: Options, experts: int, hidden_dims: dict[str, int]) -> list[str]:
    """Turn the options of a model of Meta's into ours, in place; return what is different, in sentences.

    Args:
        options: of Meta's model.
        experts: E, as the weights say.
        hidden_dims: of the experts of each side that has some, as the weights say.

    Raises:
        ValueError: an option without which the model would compute something else.
    """
    for key, reason in REFUSED.items():
        if options.get(key):
            raise ValueError(
                f"the model was trained with {flag_of(key)} {options[key]}: {reason}; convert one without "
                "it."
            )
    notes = [
        f"{flag_of(key)} {value} has no counterpart: {reason}."
        for key, reason in LEFT_OUT.items()
        if (value := options.pop(key, None))
    ]
    if "encoder_layers" in options and not options.get("use_moe_pad_mask"):
        notes.append(
            "without --use-moe-pad-mask Meta routes padding too, which takes places of experts; here it "
            "never does."
        )
    # Meta's masking of outputs scales them in evaluation, as one factor of ours does.
    masked = {key: options.pop(key, None) or 0.0 for key in ("moe_eom", "moe_fom")}
    if (scale := math.prod(1 - rate for rate in masked.values())) != 1:
        options["moe_routed_scaling_factor"] = scale
        given = " ".join(f"{flag_of(key)} {rate}" for key, rate in masked.items() if rate)
        notes.append(
            f"{given} became --moe-routed-scaling-factor {scale:g}, which evaluates the same; a training "
            "from here masks no outputs."
        )
    # An encoder-decoder's options hold those of its criterion and task too.
    parts = ("model", "task", "criterion")
    known = {option.key for part in parts for option in options_of(part)} | {
        *REFUSED,
        "moe_cmr_xgpu",
    }
    notes += [
        f"{flag_of(key)} {value} is not known here; it is left in the file and has no effect."
        for key, value in options.items()
        if key.startswith("moe_") and value and key not in known
    ]
    if options.get("moe_top1_expert"):  # Meta's top-1 gate reads neither
        options |= {"moe_second_expert_policy": "all", BPR: False}
    for key, (default, here, _) in OPTIONS.items():
        options[key] = here(default if options.get(key) is None else options[key])
    options.update({key: here(options) for key, here in OURS_ALONE.items()})
    if (policy := options["moe_second_expert_policy"]) != "all":
        notes.append(
            f"--moe-second-expert-policy {policy}: Meta draws in evaluation too; here evaluation "
            "takes the second-best expert."
        )
    dense = all(options.get(f"{side}_ffn_embed_dim") == dim for side, dim in hidden_dims.items())
    if not dense and len(dims := set(hidden_dims.values())) > 1:
        raise ValueError(
            f"the experts have the hidden dimensions {sorted(dims)}, neither one nor the dense layers'; "
            "convert a checkpoint whose options belong to its weights."
        )
    # Meta takes the larger of a side's own frequency and the common one; ours takes its own if given.
    common = int(options.get("moe_freq") or 0)
    own = {
        key: max(int(options.pop(key, None) or 0), common)
        for key in ("encoder_moe_freq", "decoder_moe_freq")
    }
    translates = "encoder_layers" in options
    options.update(
        moe_expert_count=str(experts),
        moe_expert_ffn_dim=0 if dense else next(iter(hidden_dims.values())),
        **({"moe_freq": common, **own} if translates else {"moe_freq": own["decoder_moe_freq"]}),
    )
    return notes


def to_meta(options: Options, hidden_dims: dict[str, int]) -> list[str]:
    """Turn our options of a model into Meta's, in place; return what is different, in sentences.

    Args:
        options: of our model; keys that an older file lacks have their defaults.
        hidden_dims: of the experts of each side that has some, as the weights say.

    Raises:
        ValueError: an option without which the model would compute something else.
    """
    ours = {key: plain(value) for key, value in {**our_defaults(), **options}.items()}
    for option in options_of("model"):
        if option.common is not None and not option.common(ours[option.key]):
            _refuse(option.flag, ours[option.key])
    top_k = ours["moe_top_k"] = 1 if ours["moe_top1_expert"] else int(ours["moe_top_k"])
    counts = set(str(ours["moe_expert_count"]).split(","))
    translates, freq = "encoder_layers" in options, int(ours["moe_freq"])
    own = {f"{side}_moe_freq": int(ours[f"{side}_moe_freq"]) for side in ("encoder", "decoder")}
    own = {key: freq if value == -1 else value for key, value in own.items()} if translates else {}
    lacking = {
        "moe_top_k": top_k > 2,
        "moe_normalize_gate": ours["moe_normalize_gate"] == "none" and top_k == 2,
        "moe_expert_count": len(counts) > 1,
        # Meta's trainer saves by rank for a common frequency alone.
        **{key: value == 0 for key, value in own.items()},
    }
    for key in (key for key, lacks in lacking.items() if lacks):
        _refuse(flag_of(key), ours[key])
    for side, dim in hidden_dims.items():
        if options.get(f"{side}_ffn_embed_dim") != dim:
            _refuse("--moe-expert-ffn-dim", dim)
    meta = {key: there(ours) for key, (_, _, there) in OPTIONS.items()}
    meta |= {"moe_expert_count": int(counts.pop()), "use_moe_pad_mask": True}
    # Meta takes the larger of a side's frequency and the common one.
    meta |= {"moe_freq": min(own.values(), default=freq), **own}
    if ours["moe_routed_scaling_factor"] != 1:
        meta["moe_eom"] = 1 - ours["moe_routed_scaling_factor"]
    for key in (*our_defaults(), *(key for key in NOT_META_S if not options.get(key))):
        options.pop(key, None)
    options.update(meta)
    return [
        f"{flag_of(key)} {ours[key]} has no counterpart in Meta's branch; it counts in training alone."
        for key, values in IN_TRAINING.items()
        if ours[key] not in values
    ]
