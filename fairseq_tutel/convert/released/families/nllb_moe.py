"""Defines NLLB-MoE, which is M2M100 with experts in some layers. Each token uses two experts of a layer.

In evaluation, fairseq_tutel and transformers choose the same experts with the same weights, except in two
cases:

- transformers draws the second expert at random in evaluation too, if second_expert_policy is sampling or
  random; fairseq_tutel uses the second-best expert.
- With a limited capacity, transformers counts padding as tokens, but fairseq_tutel counts only real tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fairseq_tutel.checkpoint.saved import DENSE
from fairseq_tutel.convert.released.families.translation import FINAL_NORMS, M2M100, SHARED
from fairseq_tutel.convert.released.table import Family, Names, Option
from fairseq_tutel.files import shown
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.plugin.install import chosen_layers

TOP_K = 2
# Keys of config.json that `read_options` reads, in addition to the keys in the family's tables.
READ = ("num_experts", "expert_capacity", "moe_eval_capacity_token_fraction", "moe_token_dropout")
POLICIES = {name: name for name in ("all", "sampling", "random")}
# For each router_dtype of transformers, whether the gate has the model's dtype instead of float32.
ROUTER_DTYPES = {"float32": False, "bfloat16": True, "float16": True}
MOST_EXPERTS = 10_000  # A config.json with more experts per layer is refused.
# A token fraction that is so small that the minimum capacity applies.
ONE_SLOT = 1e-9
# fairseq_tutel options that must have these values, because other values change the computation.
FIXED = {
    "moe_top_k": TOP_K,
    "moe_choice": "tokens",
    "moe_score_function": "softmax",
    "moe_prescore": False,
    "moe_expert_groups": 1,
    "moe_balance_bias": False,
    "moe_expert_type": "ffn",
    "moe_shared_experts": 0,
    "moe_residual": False,
    "moe_cmr": False,
    "moe_fom": 0.0,
    "moe_eval_capacity_max_seqlen": False,
    "moe_pregate": 0,
    "moe_capacity_multiple": 1,
}


def sparse_layers(side: str, sparse: bool = True) -> Callable[[Mapping[str, Any]], list[int]]:
    """Return a function that returns the indices of a side's layers with (or without) experts."""

    def of(options: Mapping[str, Any]) -> list[int]:
        indices = range(options[f"{side}_layers"])
        found = chosen_layers(indices, options[f"{side}_moe_freq"])
        return [i for i in indices if (i in found) == sparse]

    return of


def _layer(side: str) -> list[Names]:
    """Return the tensor names of the encoder's or decoder's layers, without the experts' tensors."""
    parts = [
        ("self_attn.{k,v,q,out}_proj.{weight,bias}", "self_attn.{k,v,q,out}_proj.{weight,bias}", None),
        ("self_attn_layer_norm.{weight,bias}", "self_attn_layer_norm.{weight,bias}", None),
        ("ff_layer_norm.{weight,bias}", "final_layer_norm.{weight,bias}", None),
        ("ffn.{fc1,fc2}.{weight,bias}", "{fc1,fc2}.{weight,bias}", sparse_layers(side, False)),
        ("ffn.router.classifier.weight", "fc1.gate.weight", sparse_layers(side)),
    ]
    if side == "decoder":
        parts += [
            ("cross_attention.{k,v,q,out}_proj.{weight,bias}",
             "encoder_attn.{k,v,q,out}_proj.{weight,bias}", None),
            ("cross_attention_layer_norm.{weight,bias}", "encoder_attn_layer_norm.{weight,bias}", None),
        ]  # fmt: skip
    count = f"{side}_layers"
    names = [
        Names(f"model.{side}.layers.*.{theirs}", f"{side}.layers.*.{ours}", count, only=only)
        for theirs, ours, only in parts
    ]
    bias = Names(
        f"model.{side}.layers.*.ffn.router.classifier.bias",
        f"{side}.layers.*.fc1.gate.bias",
        count,
        when={"moe_gate_type": "biased"},
        only=sparse_layers(side),
    )
    return [*names, bias]


@dataclass(frozen=True, kw_only=True)
class MoEFamily(Family):
    """A model family with experts: `stacks` names the experts' tensors, and `rows` all other tensors."""

    def stacks(self, options: Mapping[str, Any]) -> dict[str, tuple[list[str], tuple[int, ...]]]:
        """For each stacked tensor, return transformers' names of its E tensors, and one tensor's shape."""
        found = {}
        for side in SIDES:
            model_dim, hidden_dim = options[f"{side}_embed_dim"], options[f"{side}_ffn_embed_dim"]
            shapes = ((hidden_dim, model_dim), (hidden_dim,), (model_dim, hidden_dim), (model_dim,))
            for i in sparse_layers(side)(options):
                for part, shape in zip(DENSE, shapes, strict=True):
                    stack = f"{side}.layers.{i}.fc1.experts.{part.replace('.', '_')}"
                    prefix = f"model.{side}.layers.{i}.ffn.experts.expert_"
                    experts = range(int(options["moe_expert_count"]))
                    found[stack] = [f"{prefix}{e}.{part}" for e in experts], shape
        return found

    def read_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return fairseq options for a config.json.

        Raises:
            ValueError: a value in config.json has no counterpart in fairseq.
        """
        found = super().read_options(config)
        for side in SIDES:  # In transformers, a sparse step below 0 means no experts.
            found[f"{side}_moe_freq"] = max(0, found[f"{side}_moe_freq"])
        experts = config.get("num_experts", 128)
        if type(experts) is not int or not TOP_K <= experts <= MOST_EXPERTS:
            raise ValueError(
                f"config.json has num_experts {shown(experts)}; give a model with {TOP_K} to "
                f"{MOST_EXPERTS} experts per layer."
            )
        found["moe_expert_count"] = str(experts)
        if not self.stacks(found):
            raise ValueError(
                "config.json has sparse steps (encoder_sparse_step and decoder_sparse_step) with which no "
                "layer has experts; give a model with experts."
            )
        if found["moe_second_expert_policy"] == "random" and found["moe_normalize_gate"] == "before":
            raise ValueError(
                "config.json has second_expert_policy 'random' and normalize_router_prob_before_dropping, "
                "with which transformers normalizes only the first expert's weight; set one of the two "
                "options to its default."
            )
        dropout = config.get("moe_token_dropout", 0.2)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(
                f"config.json has moe_token_dropout {dropout!r}; give a number from 0 to below 1."
            )
        return found | _read_capacity(config) | {"moe_eom": float(dropout)}

    def notes(self, options: Mapping[str, Any]) -> list[str]:
        """Return notes on differences between fairseq_tutel and transformers for a model's options."""
        notes = []
        if (policy := options["moe_second_expert_policy"]) != "all":
            notes.append(
                f"second_expert_policy {policy}: transformers draws the second expert at random in "
                "evaluation too; fairseq_tutel uses the second-best expert in evaluation."
            )
        if options["no_moe_gating_use_fp32"]:
            notes.append(
                "the router's dtype is not float32: fairseq_tutel computes the gate in the model's dtype, "
                "so outputs agree for a model in that dtype."
            )
        if options["moe_eval_capacity_token_fraction"] != 0:
            notes.append(
                "the capacity is limited: transformers counts padding as tokens, so outputs of batches "
                "with padding may differ."
            )
        if eom := options["moe_eom"]:
            notes.append(
                f"moe_token_dropout became --moe-eom {eom:g}; in training it masks whole outputs of "
                "experts, and transformers masks single values."
            )
        return notes

    def write_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json for fairseq options.

        Raises:
            ValueError: a fairseq option has no counterpart in transformers.
        """
        # transformers multiplies outputs of experts by 1 - moe_token_dropout in evaluation.
        factor = options["moe_routed_scaling_factor"] * (1.0 - options["moe_eom"])
        if not 0 < factor <= 1:
            raise ValueError(
                f"INPUT multiplies experts' outputs by {factor:g} (--moe-routed-scaling-factor and "
                f"--moe-eom), but {self.architectures[0]} has only factors of at most 1 (1 - "
                "moe_token_dropout)."
            )
        counts = {*str(options["moe_expert_count"]).split(",")}
        if len(counts) > 1:
            raise ValueError(
                f"INPUT has --moe-expert-count {options['moe_expert_count']}, but "
                f"{self.architectures[0]} has the same number of experts in each layer."
            )
        found = super().write_options(options) | _write_capacity(options)
        dropout = round(1.0 - factor, 12)
        return found | {"num_experts": int(counts.pop()), "moe_token_dropout": dropout}


def _read_capacity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fairseq_tutel's options for the evaluation capacity that a config.json describes.

    In training, an expert has 2 * ceil(tokens / experts) slots, as in Meta's branch. In transformers, the
    number of slots in training is constant.
    """
    fraction, slots = config.get("moe_eval_capacity_token_fraction", 1.0), config.get("expert_capacity", 64)
    training = {"moe_capacity_factor": 1.0}
    for name, value, kinds in (
        ("moe_eval_capacity_token_fraction", fraction, int | float),
        ("expert_capacity", slots, int | None),
    ):
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"config.json has {name} {value!r}; give a number.")
    if fraction >= 1:  # Each expert has a slot for every token.
        return training | {"moe_eval_capacity_token_fraction": 0.0}
    if fraction > 0:
        return training | {"moe_eval_capacity_token_fraction": float(fraction)}
    if slots is None:
        return training | {"moe_eval_capacity_token_fraction": -1.0}
    if slots < 1:
        raise ValueError(f"config.json has expert_capacity {slots}; give a number of at least 1.")
    return training | {"moe_eval_capacity_token_fraction": ONE_SLOT, "moe_min_capacity": slots}


def _write_capacity(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' options for the evaluation capacity that fairseq_tutel's options describe.

    Raises:
        ValueError: transformers has no options for an equal capacity.
    """
    fraction, factor = options["moe_eval_capacity_token_fraction"], options["moe_eval_capacity_factor"]
    least = options["moe_min_capacity"]
    if fraction == 0 and factor == 0:
        return {"moe_eval_capacity_token_fraction": 1.0, "expert_capacity": None}
    if fraction == ONE_SLOT:
        return {"moe_eval_capacity_token_fraction": 0.0, "expert_capacity": least}
    if fraction > 0 and least <= 1:
        return {"moe_eval_capacity_token_fraction": fraction, "expert_capacity": None}
    raise ValueError(
        f"INPUT has --moe-eval-capacity-token-fraction {fraction:g}, --moe-eval-capacity-factor "
        f"{factor:g} and --moe-min-capacity {least}, but transformers limits the capacity only to a "
        "fraction of the tokens; train with a --moe-eval-capacity-token-fraction of at least 0 alone."
    )


NLLB_MOE = MoEFamily(
    **{field.name: getattr(M2M100, field.name) for field in fields(M2M100)}
    | {
        "name": "nllb-moe",
        "architectures": ("NllbMoeForConditionalGeneration", "NllbMoeModel"),
        "arch": "moe_transformer",
        "names": (SHARED, *_layer("encoder"), *_layer("decoder"), FINAL_NORMS),
        "options": (
            *M2M100.options,
            Option("encoder_sparse_step", "encoder_moe_freq", 4),
            Option("decoder_sparse_step", "decoder_moe_freq", 4),
            Option("router_bias", "moe_gate_type", False, {False: "linear", True: "biased"}),
            Option("router_dtype", "no_moe_gating_use_fp32", "float32", ROUTER_DTYPES),
            Option("second_expert_policy", "moe_second_expert_policy", "all", POLICIES),
            Option(
                "normalize_router_prob_before_dropping",
                "moe_normalize_gate",
                False,
                {True: "before", False: "after"},
            ),
            Option("batch_prioritized_routing", "moe_drop_policy", False, {True: "bpr", False: "position"}),
        ),
        "fixed": {**M2M100.fixed, **FIXED},
        "ignored": "|".join((*READ, "router_(aux|z)_loss_coef")),
        "setup": lambda setup: {**M2M100.setup(setup), "task": "moe_translation_multi_simple_epoch"},
    }
)
