"""Where every weight of a model of ours is in the files of Meta's moe branch.

E experts of a layer, e local ones in the file of each of W ranks. Local expert I of rank N is the global
one (N e + I) mod E: where there are more ranks than experts, every E neighbours exchange tokens and hold
all experts once.
"""

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fairseq_tutel.tools.convert.meta_files import MetaFiles, rank_path
from fairseq_tutel.tools.convert.optimizer_state import SHARED, Source

LAYER = r"((?:encoder|decoder)\.layers\.\d+)\.moe_layer"
GATE = re.compile(LAYER + r"\.gate\.wg\.weight")
EXPERT = re.compile(LAYER + r"\.experts\.(\d+)\.(fc[12]\.(?:weight|bias))")
# Of an expert, in Meta's order and ours.
TENSORS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")

# Every weight that stock fairseq's models have, whose names and meaning are the same in Meta's branch.
STOCK = re.compile(
    r"(?:encoder|decoder)\.(?:"
    r"version|embed_tokens\..+|embed_positions\.(?:weight|_float_tensor)"
    r"|(?:layernorm_embedding|layer_norm)\.(?:weight|bias)"
    r"|(?:project_in_dim|project_out_dim|output_projection)\.weight|adaptive_softmax\..+"
    r"|layers\.\d+\.(?:(?:self_attn|encoder_attn)\.(?:(?:[kqv]|out)_proj\.(?:weight|bias)|bias_[kv])"
    r"|(?:self_attn_layer_norm|encoder_attn_layer_norm|final_layer_norm|fc1|fc2)\.(?:weight|bias))"
    r")|decoder\.layers\.\d+\.attn_ln\.(?:weight|bias)"
)


def our_gate(layer: str) -> str:
    """Return our name of a layer's gate."""
    return f"{layer}.fc1.gate.weight"


def our_experts(layer: str, tensor: str) -> str:
    """Return our name of all experts' fc1.weight, …, of a layer."""
    return f"{layer}.fc1.experts.{tensor.replace('.', '_')}"


def meta_gate(layer: str) -> str:
    """Return Meta's name of a layer's gate."""
    return f"{layer}.moe_layer.gate.wg.weight"


def meta_expert(layer: str, local: int, tensor: str) -> str:
    """Return Meta's name of a local expert's fc1.weight, …, of a layer."""
    return f"{layer}.moe_layer.experts.{local}.{tensor}"


def gathered(source: Source, tensor_of: Callable[[int, str], Tensor]) -> Tensor:
    """Return one tensor from where it is, or all experts' stacked."""
    if source[0][0] == SHARED:
        return tensor_of(*source[0])
    return torch.stack([tensor_of(*place) for place in source])


def weight_sources(files: MetaFiles) -> dict[str, Source]:
    """Return where every weight of our model is, in its order.

    Raises:
        ValueError: a file or weight is missing, has another shape, or is not known here.
    """
    gates = dict(_gates(files))
    if not gates:
        raise ValueError(
            f"--input names {files.path(SHARED)}, which has no experts (no …moe_layer.gate.wg.weight); a "
            "dense checkpoint needs no conversion."
        )
    for rank in range(len(files.ranks)):
        _check_rank(files, rank, gates)
    sources: dict[str, Source] = {}
    for name in files.shared["model"]:
        gate = GATE.fullmatch(name)
        if gate is not None:
            sources[our_gate(gate[1])] = [(SHARED, name)]
            sources.update(_expert_sources(files, gate[1], gates[gate[1]]))
        elif STOCK.fullmatch(name):
            sources[name] = [(SHARED, name)]
        else:
            _refuse_unknown(files, SHARED, name)
    return sources


def _gates(files: MetaFiles) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in files.shared["model"].items():
        match = GATE.fullmatch(name)
        if match is not None:
            yield match[1], tensor


def _refuse_unknown(files: MetaFiles, file: int, name: str) -> None:
    raise ValueError(
        f"--input names {files.path(file)}, which has the weight {name}, that no model here has; convert a "
        "checkpoint without it."
    )


def _refuse_mixture(files: MetaFiles, file: int, what: str) -> None:
    raise ValueError(f"--input names {files.path(file)}, {what}; give the files of one training.")


def _check_rank(files: MetaFiles, rank: int, gates: dict[str, Tensor]) -> None:
    """Refuse a rank's file that has not the same experts as the first one, of the gates' width."""
    model, first = files.ranks[rank]["model"], files.ranks[0]["model"]
    for name in first:
        if name not in model:
            _refuse_mixture(files, rank, f"which lacks {name}")
    for name, tensor in model.items():
        match = EXPERT.fullmatch(name)
        if match is None or match[1] not in gates:
            _refuse_unknown(files, rank, name)
        elif name not in first:
            _refuse_mixture(files, 0, f"which lacks {name}")
        elif tensor.shape != first[name].shape:
            found, expected = tuple(tensor.shape), tuple(first[name].shape)
            _refuse_mixture(files, rank, f"whose {name} has the shape {found} and not {expected}")


def _expert_sources(files: MetaFiles, layer: str, gate: Tensor) -> dict[str, Source]:
    """Return where each expert of a layer is, for each of its tensors."""
    (num_experts, model_dim), ranks = gate.shape, len(files.ranks)
    first = files.ranks[0]["model"]
    local = len(
        {match[2] for name in first if (match := EXPERT.fullmatch(name)) and match[1] == layer}
    )
    held = local * ranks
    if local == 0:
        _refuse_mixture(files, 0, f"which has no experts of {layer}")
    if held < num_experts or held % num_experts:
        raise ValueError(
            f"--input names {rank_path(files.prefix, ranks)}, which does not exist: {layer} has "
            f"{num_experts} experts, {local} in each file; give all of them."
        )
    if local > 1 and held > num_experts:
        _refuse_mixture(
            files, ranks - 1, f"which makes {held} experts of {layer}, not {num_experts}"
        )
    sources = {}
    for tensor in TENSORS:
        places = [divmod(expert, local) for expert in range(num_experts)]
        source = [(rank, meta_expert(layer, i, tensor)) for rank, i in places]
        for rank, name in source:
            if name not in files.ranks[rank]["model"]:
                _refuse_mixture(files, rank, f"which lacks {name}")
        sources[our_experts(layer, tensor)] = source
    shapes = [tuple(first[meta_expert(layer, 0, tensor)].shape) for tensor in TENSORS]
    hidden_dim = shapes[0][0]
    if shapes != [(hidden_dim, model_dim), (hidden_dim,), (model_dim, hidden_dim), (model_dim,)]:
        _refuse_mixture(files, 0, f"whose experts of {layer} have the shapes {shapes}")
    return sources


def differing_copies(files: MetaFiles) -> list[str]:
    """Say where two ranks hold the same expert with other weights."""
    gates = dict(_gates(files))
    for rank, state in enumerate(files.ranks):
        for name, tensor in state["model"].items():
            layer = name.partition(".moe_layer.")[0]
            first = rank % gates[layer].shape[0]
            if first != rank and not torch.equal(tensor, files.ranks[first]["model"][name]):
                return [
                    f"{files.path(rank)} and {files.path(first)} hold one expert with different weights "
                    f"({name}); those of the second are taken."
                ]
    return []


def model_of_first_rank(files: MetaFiles) -> dict[str, Tensor]:
    """Return the weights of the first rank's model in the order in which the model has them."""
    experts, model = files.ranks[0]["model"], {}
    for name, tensor in files.shared["model"].items():
        model[name] = tensor
        gate = GATE.fullmatch(name)
        if gate is not None:
            prefix = f"{gate[1]}.moe_layer.experts."
            model.update({key: value for key, value in experts.items() if key.startswith(prefix)})
    return model
