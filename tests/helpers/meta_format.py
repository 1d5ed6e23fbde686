"""Writes checkpoints in the formats of Meta's moe branch of fairseq and of Tutel's fairseq example.

`layer_by_loops` computes Meta's MoE layer token by token. The checkpoint format follows the documentation
of Meta's moe branch. The file X-shared.pt holds all weights outside of experts, and X-rank-N.pt holds the
experts of rank N under local numbers. If there are more ranks than experts, rank N has expert N modulo the
number of experts. Each weight is random, with a seed that depends on its name.
"""

import argparse
import functools
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

D, H, HEADS, LAYERS = 16, 32, 2, 2
CMR_GATE = {"weight": (1, D), "bias": (1,)}


@dataclass
class Meta:
    """Describes a model of Meta's moe branch by its experts per layer, its ranks and its options."""

    words: int
    num_experts: int = 4
    ranks: int = 2
    translates: bool = False
    moe_freq: int = 1
    options: dict = field(default_factory=dict)
    args_alone: bool = False  # Older files have `args` but no `cfg`.
    task: dict = field(default_factory=dict)  # The task's name and options; empty for the default task.

    @property
    def sides(self):
        return ("encoder", "decoder") if self.translates else ("decoder",)

    def moe_layers(self):
        return [
            f"{side}.layers.{i}"
            for side in self.sides
            for i in range(LAYERS)
            if (i + 1) % self.moe_freq == 0
        ]

    def model_options(self):
        """Return the model options that the checkpoint file contains, as a flat dictionary."""
        given = {
            "activation_fn": "gelu", "dropout": 0.1, "attention_dropout": 0.0, "moe_freq": self.moe_freq,
            "activation_dropout": 0.0, "moe_expert_count": self.num_experts,
            "moe_gating_use_fp32": True, "moe_second_expert_policy": "all",
            "moe_normalize_gate_prob_before_dropping": False, "moe_expert_ffn_dim": None,
            "moe_top1_expert": False, "moe_eval_capacity_token_fraction": 0.25,
            "moe_normalize_expert_grad": "sqrt_world_size", "use_moe_pad_mask": False,
            "record_a2a_perf_stats": False, "moe_batch_prioritized_routing": False,
            "share_decoder_input_output_embed": True, "max_target_positions": 64,
            "use_tutel_moe": False, "world_size": self.ranks,
        }  # fmt: skip
        for side in self.sides:
            given |= {
                f"{side}_embed_dim": D, f"{side}_ffn_embed_dim": H, f"{side}_layers": LAYERS,
                f"{side}_attention_heads": HEADS, f"{side}_normalize_before": True,
            }  # fmt: skip
        if self.translates:
            given |= {"share_all_embeddings": True, "encoder_moe_freq": 0, "decoder_moe_freq": 0}
            given |= {"max_source_positions": 64}
        else:
            given |= {"decoder_input_dim": D, "decoder_output_dim": D}
            given |= {"add_bos_token": False, "tokens_per_sample": 16, "tpu": False}
        return given | self.options

    def names(self):
        """Yield (name, shape) of a rank's weights and buffers in the order of the model."""
        for side in self.sides:
            yield f"{side}.version", (1,)
            yield f"{side}.embed_tokens.weight", (self.words, D)
            yield f"{side}.embed_positions._float_tensor", (1,)
            for i in range(LAYERS):
                yield from self._layer_names(side, i)
            yield f"{side}.layer_norm.weight", (D,)
            yield f"{side}.layer_norm.bias", (D,)
        yield "decoder.output_projection.weight", (self.words, D)

    def _layer_names(self, side, i):
        layer = f"{side}.layers.{i}"
        attentions = ["self_attn", *["encoder_attn"] * (self.translates and side == "decoder")]
        for attention in attentions:
            for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
                yield f"{layer}.{attention}.{name}.weight", (D, D)
                yield f"{layer}.{attention}.{name}.bias", (D,)
            yield f"{layer}.{attention}_layer_norm.weight", (D,)
            yield f"{layer}.{attention}_layer_norm.bias", (D,)
        has_cmr = bool(self.options.get("moe_cmr"))
        if layer in self.moe_layers():
            # A CMR layer contains the MoE layer, so the MoE layer has a second name.
            for moe in ("moe_layer", *["cmr_layer.moe_layer"] * has_cmr):
                yield f"{layer}.{moe}.gate.wg.weight", (self.num_experts, D)
                for expert in range(self.local):
                    yield from ffn(f"{layer}.{moe}.experts.{expert}")
            if has_cmr:
                yield from ((f"{layer}.cmr_layer.gate.wg.{k}", shape) for k, shape in CMR_GATE.items())
        if layer not in self.moe_layers() or has_cmr:
            yield from ffn(layer)
        yield f"{layer}.final_layer_norm.weight", (D,)
        yield f"{layer}.final_layer_norm.bias", (D,)

    @property
    def local(self):
        return max(1, self.num_experts // self.ranks)

    def expert_of(self, rank, local):
        """Return the global ID of a rank's local expert."""
        return rank * self.local + local if self.ranks <= self.num_experts else rank % self.num_experts


def ffn(prefix):
    yield f"{prefix}.fc1.weight", (H, D)
    yield f"{prefix}.fc1.bias", (H,)
    yield f"{prefix}.fc2.weight", (D, H)
    yield f"{prefix}.fc2.bias", (D,)


@functools.cache
def drawn(name, shape, scale=0.4):
    """Return a random tensor that depends only on its name and shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * scale


def global_name(meta, name, rank):
    """Return the name of a rank's weight, with the expert's global ID instead of its local number."""
    if ".experts." not in name:
        return name
    before, _, rest = name.partition(".experts.")
    local, _, tensor = rest.partition(".")
    return f"{before}.experts.{meta.expert_of(rank, int(local))}.{tensor}"


def weight(meta, name, shape, rank=0):
    """Return the weight that a rank saves under the given name."""
    if name.endswith("version"):
        return torch.tensor([3.0])
    if name.endswith("_float_tensor"):
        return torch.zeros(1)
    if "embed_tokens" in name or "output_projection" in name:
        name = "embed"  # The model ties these weights.
    name = name.replace(".cmr_layer.moe_layer.", ".moe_layer.")
    values = drawn(global_name(meta, name, rank), shape)
    return 1 + 0.1 * values if "layer_norm.weight" in name else values


def write(meta, prefix):
    """Write the files of a checkpoint, and return the saved content by path."""
    prefix, written = Path(prefix), {}
    for rank in range(meta.ranks):
        tensors = {name: weight(meta, name, shape, rank) for name, shape in meta.names()}
        for kind in (f"rank-{rank}", *["shared"] * (rank == 0)):
            of_experts = kind != "shared"
            state = rest(meta)
            state["model"] = {k: v for k, v in tensors.items() if (".experts." in k) == of_experts}
            path = prefix.with_name(f"{prefix.name}-{kind}.pt")
            torch.save(state, path)
            written[path] = state
    return written


def rest(meta):
    """Return the content of a checkpoint without weights and optimizer state."""
    options = meta.model_options()
    names = {
        "task": meta.task.get("task", "translation" if meta.translates else "language_modeling"),
        "criterion": "moe_label_smoothed_cross_entropy" if meta.translates else "moe_cross_entropy",
        "optimizer": "adam",
        "arch": "transformer" if meta.translates else "transformer_lm_gpt",
    }
    gate_loss = {"moe_gate_loss_wt": 0.01, "moe_gate_loss_combine_method": "sum"}
    flat = argparse.Namespace(**options, **names, **gate_loss, data="data", lr=[0.001], seed=1)
    state = {
        "args": None,
        "cfg": {
            "_name": None,
            "common": {"_name": None, "seed": 1, "cpu": False, "fp16": False, "tpu": False},
            "distributed_training": {"ddp_backend": "legacy_ddp", "distributed_world_size": meta.ranks},
            "checkpoint": {"save_dir": "save", "checkpoint_suffix": "-rank-0"},
            "model": {"_name": names["arch"], **options},
            "task": {"_name": names["task"], "data": "data", "tokens_per_sample": 16, **meta.task},
            "criterion": {"_name": names["criterion"], **gate_loss, "sentence_avg": False},
            "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)", "lr": [0.001]},
        },
        "criterion": None,
        "optimizer_history": [
            {
                "criterion_name": "MoECrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"lr": 0.001},
                "num_updates": 7,
            }
        ],
        "task_state": {},
        "last_optimizer_state": {"state": {}, "param_groups": []},
        "extra_state": {
            "metrics": {"default": [(10, "cmr_lang_gates_d", "GroupedAverageMeter", {})]},
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 3, "shuffle": True},
            "val_loss": 1.0,
        },
    }  # fmt: skip
    if meta.translates:
        flat._name = names["arch"]
        state["cfg"]["model"] = flat
    if meta.args_alone:
        state |= {"args": flat, "cfg": None}
    return state


def tutel_state(meta, rank):
    """Return a rank's checkpoint of Tutel's fairseq example, in which the rank has one expert per layer."""
    state = rest(meta)
    options = state["cfg"]["model"]
    options = vars(options) if meta.translates else options
    for key in [key for key in options if "moe" in key]:
        del options[key]
    state["cfg"]["criterion"] = {"_name": "cross_entropy", "sentence_avg": False}
    weights = {}
    for name, shape in meta.names():
        tensor = weight(meta, name, shape, rank)
        layer, found, own = name.partition(".moe_layer.")
        if not found:
            weights[name] = tensor
        elif own == "gate.wg.weight":
            weights[f"{layer}.moe_ffn._num_global_experts"] = torch.tensor(meta.num_experts)
            weights[f"{layer}.moe_ffn.gates.0.wg.weight"] = tensor
        else:
            part, kind = own.split(".")[-2:]
            tensor = tensor.T if own.endswith("fc2.weight") else tensor
            key = f"batched_{part}_{'w' if kind == 'weight' else 'bias'}"
            weights[f"{layer}.moe_ffn.experts.{key}"] = tensor[None].contiguous()
    state["model"] = weights
    return state


def layer_by_loops(meta, layer, x_TD, training=False, sentences=1):
    """Compute the output of Meta's MoE layer one token at a time; tokens are ordered by (sentence, time).

    Output masks (EOM and FOM) are replaced by their means, as in evaluation.
    """
    options = meta.model_options()
    probs_TE = torch.softmax(
        x_TD @ weight(meta, f"{layer}.moe_layer.gate.wg.weight", (meta.num_experts, D)).T, 1
    )
    tokens, experts = probs_TE.shape
    top_1, fraction = options["moe_top1_expert"], options["moe_eval_capacity_token_fraction"]
    capacity = (1 if top_1 else 2) * math.ceil(tokens / experts)
    if fraction > 0 and not training:
        capacity = math.ceil(fraction * tokens)
        if options.get("moe_eval_capacity_max_seqlen"):
            positions = "max_source_positions" if layer.startswith("encoder") else "max_target_positions"
            capacity = math.ceil(fraction * options[positions] * sentences)
    order = list(range(tokens))
    if options["moe_batch_prioritized_routing"] and not top_1:
        order.sort(key=lambda t: -float(probs_TE[t].max()))
    chosen, taken = [], [0] * experts
    for choice in range(1 if top_1 else 2):
        for t in order:
            first = int(probs_TE[t].argmax())
            others = probs_TE[t].clone()
            others[first] = -1
            expert = first if choice == 0 else int(others.argmax())
            chosen.append((t, expert, taken[expert] < capacity))
            taken[expert] += 1
    y_TD = torch.zeros_like(x_TD)
    for t in range(tokens):
        own = [(expert, kept) for at, expert, kept in chosen if at == t]
        gates = [float(probs_TE[t, expert]) for expert, _ in own]
        if not top_1:
            before = options["moe_normalize_gate_prob_before_dropping"]
            total = sum(g for g, (_, kept) in zip(gates, own, strict=True) if kept or before)
            gates = [g / max(total, torch.finfo().eps) for g in gates]
        for gate, (expert, kept) in zip(gates, own, strict=True):
            if kept:
                y_TD[t] += gate * _expert(options, f"{layer}.moe_layer.experts.{expert}", x_TD[t])
    y_TD *= 1 - options.get("moe_eom", 0)
    if options.get("moe_cmr"):
        weight_1D, bias_1 = (drawn(f"{layer}.cmr_layer.gate.wg.{k}", s) for k, s in CMR_GATE.items())
        for t in range(tokens):
            g = torch.sigmoid(weight_1D @ x_TD[t] + bias_1)
            y_TD[t] = g * y_TD[t] + (1 - g) * _expert(options, layer, x_TD[t])
    y_TD *= 1 - options.get("moe_fom", 0)
    dropped = sum(not kept for *_, kept in chosen)
    return y_TD, dropped


def _expert(options, name, x_D):
    w = {key.rpartition(f"{name}.")[2]: drawn(key, shape) for key, shape in ffn(name)}
    activation = {"gelu": F.gelu, "relu": F.relu, "linear": lambda h: h}[options["activation_fn"]]
    hidden = activation(w["fc1.weight"] @ x_D + w["fc1.bias"])
    return w["fc2.weight"] @ hidden + w["fc2.bias"]
