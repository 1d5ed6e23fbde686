"""Writes and opens small checkpoints with experts, without training."""

import torch

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.checkpoint.saved import SavedModel, layers_of
from fairseq_tutel.convert.configs import configs_of

D, H, E = 8, 6, 4
# These fields of MoEConfig have other names as model options.
KEYS = {"num_experts": "moe_expert_count", "hidden_dim": "moe_expert_ffn_dim"}


def save(path, layers=("decoder.layers.0", "decoder.layers.1"), change=None, **options):
    """Write a language model whose experts have these MoEConfig options; `change` edits the weights.

    A ! at the end of a layer's name makes the layer dense.
    """
    fields = {"model_dim": D, "hidden_dim": H, "num_experts": E, **options}
    model = {"decoder.version": torch.ones(1), "decoder.embed_tokens.weight": torch.randn(5, D)}
    for name in layers:
        if name.endswith("!"):
            shapes = {"fc1.weight": (H, D), "fc1.bias": (H,), "fc2.weight": (D, H), "fc2.bias": (D,)}
            step = {key: torch.randn(shape) for key, shape in shapes.items()}
        else:
            made = MoELayer(MoEConfig(**fields), seed=1, name=name).state_dict()
            step = {f"fc1.{key}": tensor for key, tensor in made.items()}
        name = name.removesuffix("!")
        model |= {f"{name}.{key}": tensor for key, tensor in step.items()}
        model[f"{name}.final_layer_norm.weight"] = torch.ones(D)
    if change is not None:
        change(model)
    saved = {key: value for key, value in fields.items() if key not in ("model_dim", "hidden_layer_norm")}
    model_options = {KEYS.get(key, f"moe_{key}"): value for key, value in saved.items()}
    state = {
        "args": None,
        "cfg": {
            "model": {"_name": "moe_transformer_lm", "moe_freq": 1, "decoder_ffn_embed_dim": H,
                      "scale_fc": "hidden_layer_norm" in options, **model_options},
            "task": {"_name": "moe_language_modeling", "moe_exchange": "ragged"},
            "criterion": {"_name": "moe_cross_entropy", "moe_gate_loss_wt": 0.1, "sentence_avg": False},
            "optimizer": {"_name": "moe_adam"},
        },
        "model": model,
        "optimizer_history": [{"num_updates": 9}],
        "extra_state": {"epoch": 2, "train_iterator": {"epoch": 3}},
        "last_optimizer_state": {"state": {0: {"step": 9}}},
    }  # fmt: skip
    state["cfg"]["model"]["moe_expert_count"] = str(fields["num_experts"])
    torch.save(state, path)
    return path


def load(path):
    return torch.load(path, weights_only=True)


def outputs(path, x):
    """Return the FFN or MoE output of each layer for x [T, D] in evaluation, by the layer's label.

    The experts use the default activation, relu.
    """
    state = load(path)
    found = {}
    configs = configs_of(SavedModel.open(path)) if any(".experts." in key for key in state["model"]) else {}
    for layer in layers_of(state["model"]):
        prefix = f"{layer.moe}." if layer.has_experts else f"{layer.name}."
        own = {k.removeprefix(prefix): t for k, t in state["model"].items() if k.startswith(prefix)}
        if layer.has_experts:
            module = MoELayer(configs[layer], seed=0).eval()
            module.load_state_dict(own)
            found[layer.label] = module(x)[0].detach()
        else:
            found[layer.label] = _dense(own, x)
    return found


def _dense(step, x):
    hidden = torch.relu(x @ step["fc1.weight"].T + step["fc1.bias"])
    if "ffn_layernorm.weight" in step:
        hidden = torch.layer_norm(hidden, hidden.shape[-1:], step["ffn_layernorm.weight"])
    return hidden @ step["fc2.weight"].T + step["fc2.bias"]
