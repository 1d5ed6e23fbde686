"""The tests check every expert weight of `convert tutel`, and compare a layer with Tutel's formula."""

import meta_format
import pytest
import torch
import torch.nn.functional as F
from tool_in_process import convert, refusal
from torch import nn

import fairseq_tutel as ft

D, H = 6, 8


def load(path):
    return torch.load(path, weights_only=False)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def ffn(experts, hidden=H, biases=("fc1", "fc2")):
    """Return the tensors of all experts of Tutel's `ffn`, in which both weights are [E, H, …]."""
    whole = {"batched_fc1_w": drawn(experts, hidden, D), "batched_fc2_w": drawn(experts, hidden, D) / 2}
    if "fc1" in biases:
        whole["batched_fc1_bias"] = drawn(experts, hidden)
    if "fc2" in biases:
        whole["batched_fc2_bias"] = drawn(experts, D)
    return whole


def llama(experts, hidden=H):
    shapes = {"W_fc1": (D, hidden), "W_fc2": (D, hidden), "W_fc3": (hidden, D)}
    return {name: drawn(experts, *shape) * 0.1 for name, shape in shapes.items()}


def part_of(name, whole, ranks, rank):
    """Return the part of a tensor [E, …] that a rank of Tutel holds."""
    experts = whole.shape[0]
    if ranks <= experts:
        local = experts // ranks
        own = whole[rank * local : (rank + 1) * local]
        return own.flatten() if name.startswith("W_") else own.clone()
    share = ranks // experts
    own, piece = whole[rank // share], rank % share
    width = -(-(own.numel() if name.startswith("W_") else own.shape[0]) // share)
    flat = own.flatten() if name.startswith("W_") else own
    flat = torch.cat([flat, flat.new_zeros(width * share - flat.shape[0], *flat.shape[1:])])
    flat = flat[piece * width : (piece + 1) * width]
    return flat if name.startswith("W_") else flat[None]


def write(folder, experts, ranks, whole, gates, name="m-{rank}-of-{size}", wrapped=lambda weights: weights):
    """Write the files of a model with a dense layer and a Tutel layer named `moe`."""
    for rank in range(ranks):
        weights = {
            "dense.weight": drawn(3, 3),
            "moe._num_global_experts": torch.tensor(experts),
            **{f"moe.experts.{key}": part_of(key, t, ranks, rank) for key, t in whole.items()},
            **{f"moe.{key}": tensor for key, tensor in gates.items()},
        }
        path = name.replace("{rank}", str(rank)).replace("{size}", str(ranks))
        torch.save(wrapped(weights), folder / path)


def words(folder, ranks):
    return ("tutel", "--input-prefix", folder / "m-", "--input-size", ranks, "--output", folder / "o")


def linear(experts):
    return {"gates.0.wg.weight": drawn(experts, D)}


def model(gate, **experts):
    """Return a model with a random `fairseq_tutel.moe_layer`."""
    holder = nn.Module()
    holder.dense = nn.Linear(3, 3, bias=False)
    gate = [{"k": 2, "capacity_factor": 0.0, **g} for g in (gate if isinstance(gate, list) else [gate])]
    holder.moe = ft.moe_layer(gate_type=gate, model_dim=D, experts=experts)
    return holder


def by_loops(logits_TE, expert, x_TD):
    """Compute Tutel's layer by loops for k = 2 without a capacity limit, with normalized weights."""
    y = []
    for t, probs_E in enumerate(torch.softmax(logits_TE, 1)):
        first, second = probs_E.topk(2).indices.tolist()
        total = probs_E[first] + probs_E[second]
        y.append(sum(probs_E[e] / total * expert(e, x_TD[t]) for e in (first, second)))
    return torch.stack(y)


def ffn_expert(whole):
    def run(e, x_D):
        w = {key: tensor[e] for key, tensor in whole.items()}
        hidden = F.relu(w["batched_fc1_w"] @ x_D + w.get("batched_fc1_bias", 0))
        return hidden @ w["batched_fc2_w"] + w.get("batched_fc2_bias", 0)

    return run


def llama_expert(whole):
    def run(e, x_D):
        w = {key: tensor[e] for key, tensor in whole.items()}
        return (F.silu(x_D @ w["W_fc1"]) * (x_D @ w["W_fc2"])) @ w["W_fc3"]

    return run


FFN_OF = {"type": "ffn", "hidden_size_per_expert": H}
KINDS = {
    "ffn, 4 experts on 2 ranks": (4, 2, ffn(4), FFN_OF),
    "ffn, 3 on 1": (3, 1, ffn(3), FFN_OF),
    "ffn, 2 on 4": (2, 4, ffn(2), FFN_OF),
    "ffn without the first bias, 2 on 4": (
        2, 4, ffn(2, biases=("fc2",)), {**FFN_OF, "has_fc1_bias": False},
    ),
    "ffn without biases": (
        4, 4, ffn(4, biases=()), {**FFN_OF, "has_fc1_bias": False, "has_fc2_bias": False},
    ),
    "llama_ffn, 4 on 2": (4, 2, llama(4), {"type": "llama_ffn", "hidden_size_per_expert": H}),
    "llama_ffn padded, 2 on 8": (
        2, 8, llama(2, 7), {"type": "llama_ffn", "hidden_size_per_expert": 7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_convert_tutel_keeps_every_weight_and_the_output_equals_tutels_formula(case, tmp_path):
    experts, ranks, whole, kind = KINDS[case]
    write(tmp_path, experts, ranks, whole, linear(experts))
    convert(*words(tmp_path, ranks))
    holder = model({"type": "top"}, num_experts_per_device=experts, **kind)
    holder.load_state_dict(load(tmp_path / "o"))
    assert torch.equal(holder.dense.weight, drawn(3, 3))
    x_TD = drawn(11, D)
    expert = llama_expert(whole) if kind["type"] == "llama_ffn" else ffn_expert(whole)
    expected = by_loops(x_TD @ linear(experts)["gates.0.wg.weight"].T, expert, x_TD)
    torch.testing.assert_close(holder.moe(x_TD), expected, rtol=1e-5, atol=1e-6)
    has_experts(load(tmp_path / "o"), "moe.moe.experts.", whole)


# The keys are Tutel's names of expert tensors, and the values are the names in this package.
OURS = {
    "batched_fc1_w": "fc1_weight", "batched_fc2_w": "fc2_weight", "batched_fc1_bias": "fc1_bias",
    "batched_fc2_bias": "fc2_bias", "W_fc1": "fc1_weight", "W_fc2": "fc3_weight", "W_fc3": "fc2_weight",
}  # fmt: skip


def has_experts(weights, prefix, whole):
    """Assert that the layer has these experts; all matrices except batched_fc1_w are transposed."""
    found = {k.removeprefix(prefix): t for k, t in weights.items() if k.startswith(prefix)}
    assert found.keys() == {OURS[name] for name in whole}
    for name, tensor in whole.items():
        turned = name == "batched_fc2_w" or name.startswith("W_")
        expected = tensor.transpose(1, 2) if turned else tensor
        own = found[OURS[name]]
        assert torch.equal(own, expected) and own.is_contiguous(), name


def test_convert_tutel_converts_a_cosine_gate_and_a_second_gate(tmp_path):
    gates = {
        "gates.0.temperature": torch.tensor([0.7]),
        "gates.0.sim_matrix": drawn(4, 3),
        "gates.0.cosine_projector.weight": drawn(4, D),
        "gates.0.cosine_projector.bias": drawn(4),
        "gates.1.wg.weight": drawn(3, D),
    }
    write(tmp_path, 3, 3, ffn(3), gates)
    convert(*words(tmp_path, 3))
    kinds = [{"type": "cosine_top", "proj_dim": 4}, {"type": "top"}]
    holder = model(kinds, num_experts_per_device=3, **FFN_OF)
    holder.load_state_dict(load(tmp_path / "o"))
    x_TD = drawn(11, D)
    projected = F.normalize(F.linear(x_TD, gates["gates.0.cosine_projector.weight"], drawn(4)), dim=1)
    cosine = projected @ F.normalize(gates["gates.0.sim_matrix"], dim=0)
    logits = (cosine * torch.tensor(0.7).exp(), x_TD @ gates["gates.1.wg.weight"].T)
    for index, logits_TE in enumerate(logits):
        expected = by_loops(logits_TE, ffn_expert(ffn(3)), x_TD)
        got = holder.moe(x_TD, gate_index=index)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class OwnExperts(nn.Module):
    def __init__(self, model_dim, num_experts_per_device, sharded_count):
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(num_experts_per_device, 1, model_dim))

    def forward(self, x, ctx):
        return x * self.inner.scale


class OwnGate(nn.Module):
    def __init__(self, model_dim, num_global_experts):
        super().__init__()
        self.map = nn.Linear(model_dim, num_global_experts)
        self.top_k = 2

    def forward(self, x):
        return self.map(x)


def test_convert_tutel_converts_custom_gates_and_experts(tmp_path):
    scale = drawn(4, 1, D)
    gates = {"gates.0.map.weight": drawn(4, D), "gates.0.map.bias": drawn(4)}
    write(tmp_path, 4, 2, {"inner.scale": scale}, gates)
    convert(*words(tmp_path, 2))
    gate = {"type": "custom", "module": OwnGate}
    holder = nn.Module()
    holder.dense = nn.Linear(3, 3, bias=False)
    own = {"type": "custom", "module": OwnExperts, "num_experts_per_device": 4}
    holder.moe = ft.moe_layer(gate_type=gate, model_dim=D, experts=own)
    holder.load_state_dict(load(tmp_path / "o"))
    x_TD = drawn(11, D)
    logits = F.linear(x_TD, gates["gates.0.map.weight"], gates["gates.0.map.bias"])
    expected = by_loops(logits, lambda e, x: x * scale[e, 0], x_TD)
    torch.testing.assert_close(holder.moe(x_TD, capacity_factor=0), expected, rtol=1e-5, atol=1e-6)


def test_convert_tutel_finds_files_by_a_pattern_and_weights_by_a_path_of_keys(tmp_path):
    def wrapped(weights):
        return {"net": {"ema": weights, "step": 3}, "optimizer": [{"m": drawn(2)}], "epoch": 4}

    write(tmp_path, 4, 2, ffn(4), linear(4), "{rank}/of{size}.ckpt".replace("/", "-"), wrapped)
    printed = convert(
        "tutel", "--input-prefix", tmp_path / "{rank}-of{size}.ckpt", "--input-size", 2, "--namespace",
        "net/ema", "--output", tmp_path / "o",
    )  # fmt: skip
    assert "note: everything except net/ema is left out" in printed
    found = load(tmp_path / "o")
    assert found.keys() == {"net"} and found["net"].keys() == {"ema"}
    assert found["net"]["ema"]["moe.moe.experts.fc1_weight"].shape == (4, H, D)


def test_convert_tutel_reads_the_single_file_that_tutels_gather_writes(tmp_path):
    write(tmp_path, 4, 1, ffn(4), linear(4), name="all.ckpt")
    one = ("tutel", "--input-prefix", tmp_path / "all.ckpt", "--input-size", 1, "--output")
    assert "would overwrite the input" in refusal(*one, tmp_path / "all.ckpt")
    convert(*one, tmp_path / "o")
    assert load(tmp_path / "o")["moe.moe.experts.fc1_weight"].shape == (4, H, D)


def test_convert_tutel_reads_files_that_tutels_scatter_wrote_for_more_ranks_than_experts(tmp_path):
    """For W ranks, Tutel's scatter views [E, …, n] as [W, …, n * E / W]; rank r gets index r."""
    whole, ranks = ffn(2), 4
    for rank in range(ranks):
        weights = {"moe._num_global_experts": torch.tensor(2), "moe.gates.0.wg.weight": drawn(2, D)}
        for name, tensor in whole.items():
            shape = (ranks, *tensor.shape[1:-1], tensor.shape[-1] // 2)
            weights[f"moe.experts.{name}"] = tensor.reshape(shape)[rank].clone()
        torch.save(weights, tmp_path / f"m-{rank}-of-4")
    convert(*words(tmp_path, ranks))
    found = load(tmp_path / "o")
    has_experts(found, "moe.moe.experts.", whole)


def test_convert_tutel_prints_a_note_if_weights_outside_of_experts_differ_between_ranks(tmp_path):
    write(tmp_path, 4, 2, ffn(4), linear(4))
    state = load(tmp_path / "m-1-of-2")
    state["dense.weight"] += 1
    torch.save(state, tmp_path / "m-1-of-2")
    assert "note: 1 weights differ between ranks, such as dense.weight" in convert(*words(tmp_path, 2))


def changed(name, change):
    def apply(folder):
        state = load(folder / name)
        change(state)
        torch.save(state, folder / name)

    return apply


def all_changed(change):
    return lambda folder: [changed(f"m-{rank}-of-2", change)(folder) for rank in (0, 1)]


LAST = "m-1-of-2"
FILE = f"PREFIX names FOLDER/{LAST}, which"
REFUSED = {
    f"{FILE} does not exist": lambda folder: (folder / LAST).unlink(),
    f"{FILE} is corrupt or not a checkpoint": lambda folder: (folder / LAST).write_bytes(b"PK half"),
    f"{FILE} holds no weights; set --namespace": lambda folder: torch.save({"epoch": 3}, folder / LAST),
    f"{FILE} lacks the weight moe.experts.batched_fc1_bias":
        changed(LAST, lambda s: s.pop("moe.experts.batched_fc1_bias")),
    "has no Tutel layer (no _num_global_experts)":
        all_changed(lambda s: s.pop("moe._num_global_experts")),
    "PREFIX has the layer moe, which lacks experts.batched_fc2_w":
        all_changed(lambda s: s.pop("moe.experts.batched_fc2_w")),
    "which has experts.batched_fc1_bias of the shapes [(2, 7), (2, 8)] on different ranks":
        changed(LAST, lambda s: s.update({"moe.experts.batched_fc1_bias": drawn(2, 7)})),
    "which has experts.batched_fc1_bias of shape (4, 7) on all ranks together, not (4, 8)":
        all_changed(lambda s: s.update({"moe.experts.batched_fc1_bias": drawn(2, 7)})),
    "PREFIX has files that differ in moe._num_global_experts":
        changed(LAST, lambda s: s.update({"moe._num_global_experts": torch.tensor(8)})),
    "experts.batched_fc1_w of shape (2, 8, 6) on each of 2 ranks, which does not match 8 experts":
        all_changed(lambda s: s.update({"moe._num_global_experts": torch.tensor(8)})),
    "PREFIX has the layer moe, which has 3 experts, which 2 ranks cannot hold; give":
        all_changed(lambda s: s.update({"moe._num_global_experts": torch.tensor(3)})),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_convert_tutel_rejects_bad_input_with_a_one_sentence_error(sentence, tmp_path):
    write(tmp_path, 4, 2, ffn(4), linear(4))
    REFUSED[sentence](tmp_path)
    assert sentence.replace("FOLDER", str(tmp_path)) in refusal(*words(tmp_path, 2))
    assert not (tmp_path / "o").exists()


def write_example(folder, **fields):
    meta = meta_format.Meta(24, ranks=4, **fields)
    for rank in range(4):
        torch.save(meta_format.tutel_state(meta, rank), folder / f"m-{rank}-of-4")
    return words(folder, 4)


def test_convert_tutel_reads_tutels_fairseq_example_with_some_dense_layers(tmp_path):
    example = write_example(tmp_path, moe_freq=2, options={"activation_fn": "gelu"})
    message = refusal(*example)
    assert "--expert-activation is linear, but" in message
    assert "give --expert-activation gelu if" in message
    convert(*example, "--expert-activation", "gelu")
    options = load(tmp_path / "o")["cfg"]["model"]
    expected = {
        "_name": "moe_transformer_lm_gpt", "activation_fn": "gelu", "moe_freq": 2, "moe_expert_count": "4",
        "moe_top_k": 2, "moe_capacity_factor": 0.0, "moe_gate_noise": 1.0,
    }  # fmt: skip
    assert expected.items() <= options.items()
    names = ("gates.0.wg.weight", "experts.batched_fc1_w", "experts.batched_fc2_w")
    theirs = load(tmp_path / "m-3-of-4")["model"]
    gate, fc1, fc2 = (theirs[f"decoder.layers.1.moe_ffn.{name}"] for name in names)
    found = load(tmp_path / "o")["model"]
    assert torch.equal(found["decoder.layers.1.fc1.gate.weight"], gate)
    assert torch.equal(found["decoder.layers.1.fc1.experts.fc1_weight"][3], fc1[0])
    assert torch.equal(found["decoder.layers.1.fc1.experts.fc2_weight"][3], fc2[0].T)
    assert not [name for name in found if "moe_ffn" in name]


def test_convert_tutel_reads_tutels_fairseq_example_of_a_translation_model(tmp_path):
    example = write_example(tmp_path, translates=True, options={"activation_fn": "relu"})
    assert "with the MoE layer encoder.layers.0.moe_ffn" in refusal(*example)
    for rank in range(4):
        path = tmp_path / f"m-{rank}-of-4"
        state = load(path)
        norms = {f"decoder.layers.{i}.ffn_layernorm.weight": drawn(meta_format.H) for i in (0, 1)}
        kept = {k: v for k, v in state["model"].items() if "encoder" not in k or "moe_ffn" not in k}
        torch.save({**state, "model": {**kept, **norms}}, path)
    convert(*example, "--expert-activation", "relu")
    found = load(tmp_path / "o")
    options = vars(found["cfg"]["model"])
    assert (options["encoder_moe_freq"], options["decoder_moe_freq"]) == (0, 1)
    assert (options["arch"], options["task"]) == ("moe_transformer", "moe_translation")
    norm = "decoder.layers.1.fc1.experts.hidden_layer_norm.weight"
    assert torch.equal(found["model"][norm], drawn(meta_format.H))
