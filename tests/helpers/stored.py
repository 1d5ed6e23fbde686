"""Makes a small model of MoE layers, with its experts in memory, in shard files or in an expert store."""

import dataclasses

import torch
from torch import nn

from fairseq_tutel import MoEConfig, MoELayer, Topology
from fairseq_tutel.checkpoint.experts import expert_modules, save_in_shards
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.checkpoint.shards import bind
from fairseq_tutel.convert.sharded import to_sharded

FFN = MoEConfig(model_dim=8, hidden_dim=12, num_experts=6, top_k=2)
KINDS = {
    "ffn": FFN,
    "glu, norm": dataclasses.replace(FFN, expert_type="glu", hidden_layer_norm=True),
    "own": dataclasses.replace(FFN, expert_type="custom_parts.DeepExpert"),
}
WIDE = dataclasses.replace(FFN, model_dim=64, hidden_dim=128)  # An int4 group is 64 values of one row.
KINDS |= {
    "wide": WIDE,
    "wide glu": dataclasses.replace(WIDE, expert_type="glu", expert_bias=False),
    "wide norm": dataclasses.replace(WIDE, hidden_layer_norm=True),
}
BLOCKS = 3


def model_of(config, topology=None):
    return nn.ModuleList(
        MoELayer(config, topology, seed=1, name=str(block)) for block in range(BLOCKS)
    ).eval()


def write(model, folder, expert_dtype=""):
    """Write a model's experts to shard files, and write a checkpoint that names the shard files."""
    if expert_dtype:
        saved = SavedModel({"model": dict(model.state_dict())})
        to_sharded(saved, folder / "checkpoint.pt", expert_dtype)
        return folder
    save_in_shards(model, Topology(), lambda parameter: {}, folder)
    torch.save({"model": dict(model.state_dict())}, folder / "checkpoint.pt")
    for stack in expert_modules(model):
        stack.save_as(None)
    return folder


def source_of(folder):
    """Return the expert tensors of each MoE block, as loaded from a checkpoint."""
    state = torch.load(folder / "checkpoint.pt")
    bind(state, folder / "checkpoint.pt")
    experts = [key.split(".experts.") for key in state["model"] if ".experts." in key]
    return [
        {n: state["model"][f"{b}.experts.{n}"] for b, n in experts if b == str(block) and "." not in n}
        for block in range(BLOCKS)
    ]


def opened(config, store, source, topology=None):
    """Return a model whose experts are in an expert store."""
    model = model_of(config, topology)
    for layer, tensors in zip(model, source, strict=True):
        store.add(layer.experts, tensors)
    return model


def as_read(model, source):
    """Load the experts of a checkpoint into a model, and return the model."""
    for layer, tensors in zip(model, source, strict=True):
        layer.experts.load_state_dict(tensors, strict=False)
    return model
