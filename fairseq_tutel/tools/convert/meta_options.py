"""Options of a model of Meta's moe branch in our words, and ours in theirs.

Many names are the same (flags.py keeps Meta's); what stands here is what differs in name, default or
meaning. E experts, K experts per token, T tokens of a micro-batch.
"""

from fairseq_tutel.tools.convert.our_options import (
    RUN_OPTIONS,
    Options,
    flag,
    our_defaults,
    plain,
    refuse,
    refuse_what_only_ours_compute,
    top_k_of,
)

LAYER = "Meta's"

# Meta's branch: of evaluation, where the file does not say.
EVAL_FRACTION = 0.25

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
    "scale_fc",
    "scale_attn",
    "scale_heads",
    "scale_resids",
    "decoder_xformers_att_config",
)

# An encoder-decoder's options hold those of its criterion and task too.
OF_OTHER_PARTS = (
    "moe_gate_loss_wt",
    "moe_gate_loss_combine_method",
    "moe_gate_loss_transform",
    "moe_cmr_xgpu",
)

# The same, of training alone: said, not refused.
ONLY_HERE_IN_TRAINING = {
    "moe_capacity_factor": lambda v: abs(v) == 1,
    "moe_min_capacity": lambda v: v == 0,
    "moe_capacity_multiple": lambda v: v == 1,
    "moe_drop_policy": lambda v: v in ("position", "bpr"),
    "moe_rsample": lambda v: not v,
    "moe_sinkhorn": lambda v: not v,
    "moe_gate_noise": lambda v: v == 0,
    "moe_input_jitter": lambda v: v == 0,
    "moe_input_dropout": lambda v: v == 0,
    "moe_balance_loss": lambda v: v in ("gshard", "gshard:1", "switch", "switch:1"),
}


def from_meta(options: Options, num_experts: int, hidden_dims: dict[str, int]) -> list[str]:
    """Turn a model's options into ours, in place.

    Args:
        options: of Meta's model.
        num_experts: E, as the weights say.
        hidden_dims: of the experts of each side that has some, as the weights say.

    Returns:
        What has no counterpart and matters, a sentence each.

    Raises:
        ValueError: an option without which the model would compute something else.
    """
    for key, reason in REFUSED.items():
        if options.get(key):
            raise ValueError(
                f"the model was trained with {flag(key)} {options[key]}: {reason}; convert one without it."
            )
    notes = [
        f"{flag(key)} {value} has no counterpart: {reason}."
        for key, reason in LEFT_OUT.items()
        if (value := options.pop(key, None))
    ]
    if "encoder_layers" in options and not options.get("use_moe_pad_mask"):
        notes.append(
            "without --use-moe-pad-mask Meta routes padding too, which takes places of experts; here it "
            "never does."
        )
    notes += _masked_outputs(options)
    notes += _unknown(options)
    top_1 = bool(options.get("moe_top1_expert"))
    policy = str(options.get("moe_second_expert_policy") or "sampling")
    if policy != "all" and not top_1:
        notes.append(
            f"--moe-second-expert-policy {policy}: Meta draws in evaluation too; here evaluation "
            "takes the second-best expert."
        )
    options.update(
        moe_expert_count=str(num_experts),
        moe_expert_ffn_dim=_expert_ffn_dim(options, hidden_dims),
        moe_top1_expert=top_1,
        moe_top_k=1 if top_1 else 2,
        moe_second_expert_policy="all" if top_1 else policy,
        moe_batch_prioritized_routing=not top_1
        and bool(options.get("moe_batch_prioritized_routing")),
        # Meta's capacity in training is that of a factor of 1, with padding counted in.
        moe_capacity_factor=1.0,
        moe_eval_capacity_token_fraction=_eval_fraction(options),
        moe_balance_loss="gshard:1",
        moe_normalize_expert_grad=_expert_grad_norm(options),
        **_gate_options(options),
        **_frequencies(options),
    )
    return notes


def _unknown(options: Options) -> list[str]:
    """Name the options of experts that nobody here knows of, and that are on."""
    known = {*our_defaults(), *RUN_OPTIONS, *REFUSED, *OF_OTHER_PARTS}
    return [
        f"{flag(key)} {value} is not known here; it is left in the file and has no effect."
        for key, value in options.items()
        if key.startswith("moe_") and value and key not in known
    ]


def _masked_outputs(options: Options) -> list[str]:
    """Meta's masking of outputs scales them in evaluation, as one factor of ours does."""
    masked = {key: options.pop(key, None) or 0.0 for key in ("moe_eom", "moe_fom")}
    scale = 1.0
    for rate in masked.values():
        scale *= 1 - rate
    if scale == 1:
        return []
    options["moe_routed_scaling_factor"] = scale
    given = " ".join(f"{flag(key)} {rate}" for key, rate in masked.items() if rate)
    return [
        f"{given} became --moe-routed-scaling-factor {scale:g}, which evaluates the same; a training "
        "from here masks no outputs."
    ]


def _eval_fraction(options: Options) -> float:
    """Meta's capacity is as in training where the fraction is 0 or below; ours then has none at 0."""
    fraction = options.get("moe_eval_capacity_token_fraction")
    fraction = EVAL_FRACTION if fraction is None else float(fraction)
    return fraction if fraction > 0 else -1.0


def _gate_options(options: Options) -> Options:
    fp32 = bool(options.get("moe_gating_use_fp32"))
    before = bool(options.get("moe_normalize_gate_prob_before_dropping"))
    return {
        "moe_gating_use_fp32": fp32,
        "no_moe_gating_use_fp32": not fp32,
        "moe_normalize_gate_prob_before_dropping": before,
        "moe_normalize_gate": "before" if before else "after",
    }


def _expert_grad_norm(options: Options) -> str:
    value = str(options.get("moe_normalize_expert_grad") or "world_size")
    # Two names of Meta's for one number: its ranks of an exchange.
    return "sqrt_world_size" if value.startswith("sqrt") else "world_size"


def _frequencies(options: Options) -> Options:
    """Meta takes the larger of a side's own frequency and the common one; ours takes its own if given."""
    common = int(options.get("moe_freq") or 0)
    own = {
        key: max(int(options.pop(key, None) or 0), common)
        for key in ("encoder_moe_freq", "decoder_moe_freq")
    }
    if "encoder_layers" in options:
        return {"moe_freq": common, **own}
    return {"moe_freq": own["decoder_moe_freq"]}


def _expert_ffn_dim(options: Options, hidden_dims: dict[str, int]) -> int:
    """Return the experts' hidden dimension, or 0 where it is the dense layers'."""
    if all(options.get(f"{side}_ffn_embed_dim") == dim for side, dim in hidden_dims.items()):
        return 0
    dims = sorted(set(hidden_dims.values()))
    if len(dims) > 1:
        raise ValueError(
            f"the experts have the hidden dimensions {dims}, which are neither one nor those of the "
            "dense layers; convert a checkpoint whose options belong to its weights."
        )
    return dims[0]


def to_meta(options: Options, hidden_dims: dict[str, int]) -> list[str]:
    """Turn our options of a model into Meta's, in place.

    Args:
        options: of our model; keys that an older file lacks have their defaults.
        hidden_dims: of the experts of each side that has some, as the weights say.

    Returns:
        What has no counterpart and matters, a sentence each.

    Raises:
        ValueError: an option without which the model would compute something else.
    """
    ours = {**our_defaults(), **options}
    top_k = top_k_of(ours)
    refuse_what_only_ours_compute(ours, LAYER)
    if top_k > 2:
        refuse("--moe-top-k", top_k, LAYER)
    normalize = plain(ours["moe_normalize_gate"])
    if normalize == "none" and top_k == 2:
        refuse("--moe-normalize-gate", normalize, LAYER)
    counts = sorted(set(str(ours["moe_expert_count"]).split(",")))
    if len(counts) > 1:
        refuse("--moe-expert-count", ours["moe_expert_count"], LAYER)
    for side, dim in hidden_dims.items():
        if options.get(f"{side}_ffn_embed_dim") != dim:
            refuse("--moe-expert-ffn-dim", dim, LAYER)
    notes = [
        f"{flag(key)} {plain(ours[key])} has no counterpart in Meta's branch; it counts in training alone."
        for key, is_meta_s in ONLY_HERE_IN_TRAINING.items()
        if not is_meta_s(plain(ours[key]))
    ]
    fraction = _meta_eval_fraction(ours)
    bpr = ours["moe_batch_prioritized_routing"] or plain(ours["moe_drop_policy"]) == "bpr"
    meta = {
        "moe_freq": int(ours["moe_freq"]),
        "moe_expert_count": int(counts[0]),
        "moe_top1_expert": top_k == 1,
        "moe_gating_use_fp32": not ours["no_moe_gating_use_fp32"],
        "moe_normalize_gate_prob_before_dropping": normalize == "before",
        "moe_batch_prioritized_routing": bool(bpr) and top_k == 2,
        "moe_second_expert_policy": plain(ours["moe_second_expert_policy"]),
        "moe_eval_capacity_token_fraction": fraction,
        "moe_normalize_expert_grad": plain(ours["moe_normalize_expert_grad"]),
        "use_moe_pad_mask": True,
    }
    if ours["moe_routed_scaling_factor"] != 1:
        meta["moe_eom"] = 1 - ours["moe_routed_scaling_factor"]
    if "encoder_layers" in options:
        meta.update(_meta_frequencies(ours))
    for key in (*our_defaults(), *(key for key in NOT_META_S if not options.get(key))):
        options.pop(key, None)
    options.update(meta)
    return notes


def _meta_eval_fraction(ours: Options) -> float:
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
        refuse(f"{flag(key)}, which its evaluation goes by,", ours[key], LAYER)
    return 1.0 if factor == 0 else -1.0


def _meta_frequencies(ours: Options) -> Options:
    """Return the frequencies of an encoder-decoder: Meta takes the larger of a side's and the common one.

    Raises:
        ValueError: a side without experts, since Meta's trainer saves by rank for a common one alone.
    """
    common = int(ours["moe_freq"])
    own = {key: int(ours[key]) for key in ("encoder_moe_freq", "decoder_moe_freq")}
    own = {key: common if freq == -1 else freq for key, freq in own.items()}
    for key, freq in own.items():
        if freq == 0:
            refuse(flag(key), freq, LAYER)
    return {"moe_freq": min(own.values()), **own}
