"""After `convert swin`, a model gives the logits that plain torch computes from the released file."""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils
from test_convert_tutel import part_of
from tool_in_process import convert, refusal

from fairseq_tutel.convert.swin import files_of, read
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.feed_forward import moe_layers

register()
DEPTHS, HEADS, DIM, PATCH, CLASSES = (1, 2, 1), (1, 2, 4), 8, 2, 5
SIDE, WINDOW = 32, 4  # The compared models have images and windows of these sizes.
MOE, EXPERTS = "mlp._moe_layer.", ("fc1_w", "fc2_w", "fc1_bias", "fc2_bias")


def offsets(window, trained):
    """Return the table of relative positions as in the released code."""
    line = torch.arange(1.0 - window, window) / (trained - 1) * 8
    table = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).unsqueeze(0)
    return table.sign() * torch.log2(table.abs() + 1) / math.log2(8)


def position_index(window):
    """Return the index of each pair of positions in the table of `offsets`, as in the released code."""
    places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
    apart = places[:, None] - places[None] + window - 1
    return apart[..., 0] * (2 * window - 1) + apart[..., 1]


def shift_mask(side, window):
    """Return the attention mask [windows, N, N] for windows of N positions, as in the released code.

    The mask is -100 between image parts that are neighbors only because of the shift."""
    line = torch.zeros(side)
    line[-window:], line[-(window // 2) :] = 1, 2
    part = windows_of((line[:, None] * 3 + line).view(1, side, side, 1), window).squeeze(-1)
    return (part[:, :, None] != part[:, None]).float() * -100


def windows_of(x, window):
    """Split images [B, side, side, D] into windows of N positions, [windows, N, D]."""
    B, side, _, D = x.shape
    x = x.view(B, side // window, window, side // window, window, D).transpose(2, 3)
    return x.reshape(-1, window**2, D)


def images_of(x, side):
    """Join windows [windows, N, D] into images [B, side, side, D]."""
    window, D = math.isqrt(x.shape[1]), x.shape[2]
    x = x.view(-1, side // window, side // window, window, window, D).transpose(2, 3)
    return x.reshape(-1, side, side, D)


def attended(p, x, heads, mask):
    """Compute attention for windows [windows, N, D] with the released tensors of a block."""
    G, N, D = x.shape
    bias = p.get("qkv.bias")
    if bias is None:
        bias = torch.cat((p["q_bias"], torch.zeros_like(p["q_bias"]), p["v_bias"]))
    qkv = F.linear(x, p["qkv.weight"], bias).view(G, N, 3, heads, D // heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    hidden = F.linear(p["relative_coords_table"], p["cpb_mlp.0.weight"], p["cpb_mlp.0.bias"])
    table = F.linear(hidden.relu(), p["cpb_mlp.2.weight"]).view(-1, heads)
    position = table[p["relative_position_index"]].permute(2, 0, 1)
    if "logit_scale" in p:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = scores * p["logit_scale"].clamp(max=math.log(100)).exp() + 16 * position.sigmoid()
    else:
        scores = q * (D // heads) ** -0.5 @ k.mT + position
    if mask is not None:
        scores = scores + mask.repeat(G // len(mask), 1, 1).unsqueeze(1)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(G, N, D)
    return F.linear(y, p["proj.weight"], p["proj.bias"])


def by_experts(own, x, top_k):
    """Compute a released MoE layer for images [B, side, side, D] without dropped assignments."""
    p = {k.removeprefix(MOE): t for k, t in own.items() if k.startswith(MOE)}
    if "gates.0.wg.weight" in p:
        scores = x @ p["gates.0.wg.weight"].T
    else:
        weight, bias = (p[f"gates.0.cosine_projector.{kind}"] for kind in ("weight", "bias"))
        directions = F.normalize(p["gates.0.sim_matrix"], dim=0)
        scores = F.normalize(F.linear(x, weight, bias), dim=-1) @ directions
        scores = scores * p["gates.0.temperature"].clamp(max=math.log(100)).exp()
    probs = scores.softmax(-1)
    chosen, y = probs.topk(top_k).indices, torch.zeros_like(x)
    for e in range(probs.shape[-1]):
        w1, w2, b1, b2 = (p[f"experts.batched_{name}"][e] for name in EXPERTS)
        weight = probs[..., e] * (chosen == e).any(-1)
        y += weight.unsqueeze(-1) * (F.gelu(F.linear(x, w1, b1)) @ w2 + b2)
    return y


def logits(theirs, images, top_k=1):
    """Compute the logits of a released state dict for images in plain torch."""
    w = {k: t.double() if t.is_floating_point() else t for k, t in theirs.items()}

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    x = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=PATCH)
    x, is_v2 = norm("patch_embed.norm", x.permute(0, 2, 3, 1)), "layers.0.blocks.0.attn.q_bias" in w
    for i, depth in enumerate(DEPTHS):
        for j in range(depth):
            block = f"layers.{i}.blocks.{j}"
            own = {k.removeprefix(f"{block}."): t for k, t in w.items() if k.startswith(block)}
            attn = {k.removeprefix("attn."): t for k, t in own.items() if k.startswith("attn.")}
            window = math.isqrt(len(attn["relative_position_index"]))
            shift = window // 2 if "attn_mask" in own else 0

            def attention(x, attn=attn, own=own, heads=HEADS[i], window=window, shift=shift):
                parts = windows_of(x.roll((-shift, -shift), (1, 2)), window)
                y = attended(attn, parts, heads, own.get("attn_mask"))
                return images_of(y, x.shape[1]).roll((shift, shift), (1, 2))

            def step(x, own=own):
                if "mlp.fc1.weight" not in own:
                    return by_experts(own, x, top_k)
                x = F.gelu(F.linear(x, own["mlp.fc1.weight"], own["mlp.fc1.bias"]))
                return F.linear(x, own["mlp.fc2.weight"], own.get("mlp.fc2.bias"))

            for k, part in ((1, attention), (2, step)):
                name = f"{block}.norm{k}"
                x = x + (norm(name, part(x)) if is_v2 else part(norm(name, x)))
        down = f"layers.{i}.downsample"
        if f"{down}.reduction.weight" in w:
            x = torch.cat([x[:, a::2, b::2] for b in (0, 1) for a in (0, 1)], -1)
            x = x if is_v2 else norm(f"{down}.norm", x)
            x = F.linear(x, w[f"{down}.reduction.weight"])
            x = norm(f"{down}.norm", x) if is_v2 else x
    return F.linear(norm("norm", x).mean((1, 2)), w["head.weight"], w["head.bias"])


def released(form, windows=(4, 4, 2), trained=None, mlp_ratio=4):
    """Return a state dict with random weights and the tensor names of the released code."""
    shapes = {"patch_embed.proj.weight": (DIM, 3, PATCH, PATCH)}
    shapes |= dict.fromkeys(("patch_embed.proj.bias", "patch_embed.norm.weight"), (DIM,))
    shapes["patch_embed.norm.bias"] = (DIM,)
    tables = {}
    for i, (depth, heads, window) in enumerate(zip(DEPTHS, HEADS, windows, strict=True)):
        dim = DIM * 2**i
        for j in range(depth):
            block = f"layers.{i}.blocks.{j}"
            for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
                shapes[f"{block}.{name}"] = (dim,)
            if form == "v2":
                shapes[f"{block}.attn.logit_scale"] = (heads, 1, 1)
                shapes[f"{block}.attn.q_bias"] = shapes[f"{block}.attn.v_bias"] = (dim,)
            else:
                shapes[f"{block}.attn.qkv.bias"] = (3 * dim,)
            shapes |= {
                f"{block}.attn.qkv.weight": (3 * dim, dim),
                f"{block}.attn.cpb_mlp.0.weight": (512, 2),
                f"{block}.attn.cpb_mlp.0.bias": (512,),
                f"{block}.attn.cpb_mlp.2.weight": (heads, 512),
                f"{block}.attn.proj.weight": (dim, dim),
                f"{block}.attn.proj.bias": (dim,),
                f"{block}.mlp.fc1.weight": (mlp_ratio * dim, dim),
                f"{block}.mlp.fc1.bias": (mlp_ratio * dim,),
                f"{block}.mlp.fc2.weight": (dim, mlp_ratio * dim),
                f"{block}.mlp.fc2.bias": (dim,),
            }
            tables[f"{block}.attn.relative_coords_table"] = offsets(window, (trained or windows)[i])
            index = position_index(window)
            tables[f"{block}.attn.relative_position_index"] = index
            if j % 2 and window == WINDOW:
                tables[f"{block}.attn_mask"] = shift_mask(SIDE // PATCH // 2**i, window)
        if i + 1 < len(DEPTHS):
            shapes[f"layers.{i}.downsample.reduction.weight"] = (2 * dim, 4 * dim)
            for kind in ("weight", "bias"):
                width = 2 * dim if form == "v2" else 4 * dim
                shapes[f"layers.{i}.downsample.norm.{kind}"] = (width,)
    shapes |= {"norm.weight": (dim,), "norm.bias": (dim,)}
    shapes |= {"head.weight": (CLASSES, dim), "head.bias": (CLASSES,)}
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return drawn | tables


def scaled(theirs):
    """Scale weights down, so that logits stay small, and keep the position tables."""
    kept = ("table", "mask")
    return {
        k: v * 0.3 if v.is_floating_point() and not any(word in k for word in kept) else v
        for k, v in theirs.items()
    }


def released_experts(experts, cosine=False, fc2_bias=False, blocks=((1, 1),)):
    """Return the state dict of a SwinV2-MoE with experts in the given blocks (stage, index)."""
    theirs = released("moe", (WINDOW, WINDOW, WINDOW))
    generator = torch.Generator().manual_seed(2)
    for i, j in blocks:
        block, dim = f"layers.{i}.blocks.{j}.", DIM * 2**i
        theirs = {k: t for k, t in theirs.items() if not k.startswith(f"{block}mlp")}
        shapes = {
            "experts.batched_fc1_w": (experts, 4 * dim, dim),
            "experts.batched_fc2_w": (experts, 4 * dim, dim),
            "experts.batched_fc1_bias": (experts, 4 * dim),
            "experts.batched_fc2_bias": (experts, dim),
        }
        if cosine:
            shapes |= {
                "gates.0.cosine_projector.weight": (6, dim),
                "gates.0.cosine_projector.bias": (6,),
                "gates.0.sim_matrix": (6, experts),
                "gates.0.temperature": (1,),
            }
        else:
            shapes["gates.0.wg.weight"] = (experts, dim)
        for name, shape in shapes.items():
            theirs[block + MOE + name] = torch.randn(shape, generator=generator)
        if not fc2_bias:
            theirs[f"{block}{MOE}experts.batched_fc2_bias"].zero_()
    return scaled(theirs)


def of_rank(theirs, ranks, rank):
    """Return the state dict of one rank with the experts of that rank and all other weights."""
    return {
        name: part_of(name, t, ranks, rank) if "_moe_layer.experts." in name else t
        for name, t in theirs.items()
    }


def save_ranks(theirs, ranks, path, **beside):
    """Save an unfinished training run, in which every rank writes all its weights."""
    for rank in range(ranks):
        torch.save({"model": of_rank(theirs, ranks, rank), **beside}, f"{path}.rank{rank}")


def save_final(theirs, ranks, path):
    """Save the files of a finished training run, whose expert files lack the frozen fc2 biases."""
    for rank in range(ranks):
        own = of_rank(theirs, ranks, rank)
        moe = {n: t for n, t in own.items() if "experts." in n and not n.endswith("fc2_bias")}
        torch.save({"model": moe}, f"{path}.rank{rank}")
        if rank == 0:
            rest = {n: t for n, t in own.items() if n not in moe}
            torch.save({"model": rest}, f"{path}.master")


@pytest.fixture
def released_file(tmp_path):
    """Return a function that writes a file in the released format."""

    def write(*args, **kwargs):
        torch.save({"model": released(*args, **kwargs)}, tmp_path / "released.pth")
        return tmp_path / "released.pth"

    return write


def opened(path):
    """Open a checkpoint as fairseq's commands do, and return the model and the task."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return models[0].eval(), task


def test_a_released_swin_model_opens_with_a_new_head_and_another_window(released_file, tmp_path):
    how, output = {"windows": (8, 8, 4), "trained": (4, 4, 4), "mlp_ratio": 2}, tmp_path / "ours.pt"
    source = released_file("v2", **how)
    said = convert("swin", "--input", source, "--output", output, "--classes", 7)
    assert "form v2" in said and "7 classes, images of 3 x 32 x 32" in said
    model, task = opened(output)
    attn, last = model.stages[0].blocks[0].attn, model.stages[2].blocks[0].attn
    assert (attn.cpb_mlp.trained_window, last.cpb_mlp.trained_window) == (4, 0)
    assert task.num_classes == 7 and task.channels == 3
    assert torch.equal(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, 7))


@pytest.mark.parametrize(("form", "fc2_bias"), [("v2", True), ("moe", False)])
def test_a_converted_swin_model_gives_the_logits_of_plain_torch(tmp_path, form, fc2_bias, monkeypatch):
    """The input file contains a configuration object whose class cannot be imported."""
    theirs = scaled(released(form, (WINDOW, WINDOW, WINDOW)))
    if not fc2_bias:
        theirs = {name: t for name, t in theirs.items() if not name.endswith("fc2.bias")}

    class CfgNode(dict):
        """Imitates the configuration class of yacs, a dictionary with attributes."""

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    yacs = types.ModuleType("yacs.config")
    yacs.CfgNode = CfgNode
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", yacs)
    config = CfgNode(MODEL=CfgNode(NAME="swin"), EPOCHS=90)
    config.__dict__["__immutable__"] = True
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    saved = {"model": theirs, "config": config, "optimizer": optimizer, "epoch": 3}
    torch.save(saved, tmp_path / "theirs.pth")
    monkeypatch.undo()
    convert("swin", "--input", tmp_path / "theirs.pth", "--output", tmp_path / "ours.pt")
    images = torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64)
    found = opened(tmp_path / "ours.pt")[0].double()(images)
    torch.testing.assert_close(found, logits(theirs, images), rtol=0, atol=1e-6)


ALL = [(i, j) for i, depth in enumerate(DEPTHS) for j in range(depth)]
# Each entry has the number of experts, the number of ranks, whether the gate is cosine, the file format,
# and the --input file.
SAVED = {
    "whole experts, at the end": (4, 2, False, "final", "x.pth"),
    "split experts, at the end": (2, 4, True, "final", "x.pth.master"),
    "split experts, midway": (2, 4, False, "midway", "x.pth"),
    "one rank, all blocks": (3, 1, False, "global", "x.pth"),
}


@pytest.mark.parametrize("case", SAVED)
def test_a_converted_swin_model_with_experts_gives_the_logits_of_plain_torch(tmp_path, case):
    experts, ranks, cosine, how, named = SAVED[case]
    blocks, top_k = ALL if "all blocks" in case else [(1, 1)], 1
    theirs = released_experts(experts, cosine, how != "final", blocks)
    if how == "final":
        theirs["layers.1.blocks.1.mlp._moe_layer._num_global_experts"] = torch.tensor(experts)
        save_final(theirs, ranks, tmp_path / "x.pth")
    elif how == "midway":
        top_k = 2
        options = {"TOP_VALUE": top_k, "NORMALIZE_GATE": False, "CAPACITY_FACTOR": 2.0}
        config = {"MODEL": {"SWIN_MOE": options}}
        save_ranks(theirs, ranks, tmp_path / "x.pth", config=config, epoch=3)
    else:
        torch.save({"model": theirs}, tmp_path / "x.pth.global")
    output = tmp_path / "ours.pt"
    said = convert("swin", "--input", tmp_path / named, "--output", output)
    gate = "cosine" if cosine else "linear"
    assert "swin_v2_moe, form moe" in said
    labels = ", ".join(f"stages_{i}_{j}" for i, j in blocks)
    assert f"{experts} experts, top-{top_k}, {gate} gate, in {labels}\n" in said
    images = torch.randn(1, 3, SIDE, SIDE, dtype=torch.float64)
    model = opened(output)[0].double()
    capacity = 2.0 if how == "midway" else 1.25
    assert [own.config.capacity_factor for own in moe_layers(model)] == [capacity] * len(blocks)
    torch.testing.assert_close(model(images), logits(theirs, images, top_k), rtol=0, atol=1e-6)


def refused(path):
    with pytest.raises(ValueError) as error:
        read(files_of(path))
    return str(error.value)


def test_convert_swin_raises_an_error_for_an_incomplete_model_with_experts(tmp_path):
    theirs, block = released_experts(4), "layers.1.blocks.1.mlp._moe_layer."
    for remove, ranks, sentence in (
        (["rank0"], 2, "x.pth.rank0, which does not exist"),
        (["rank1"], 2, "which does not match 4 experts; give all files"),
        (["rank3"], 4, "layer layers.1.blocks.1.mlp._moe_layer, which has 4 experts, which 3 ranks cannot"),
        (["master"], 2, "is not a Swin"),
        (["master", "rank0", "rank1"], 2, "does not exist"),
    ):
        for old in tmp_path.glob("x.pth*"):
            old.unlink()
        save_final(theirs, ranks, tmp_path / "x.pth")
        for end in remove:
            (tmp_path / f"x.pth.{end}").unlink()
        assert sentence in refused(tmp_path / "x.pth")
    for change, sentence in (
        ({f"{block}experts.W_fc9": torch.ones(4, 3)}, "has experts.W_fc9, which ffn experts do not have"),
        (
            {f"{block}other": torch.ones(1)},
            "(1,) instead of None for stages.1.blocks.1.fc1.other",
        ),
        ({f"{block}gates.0.wg.weight": torch.ones(1)}, "without a linear or cosine gate"),
    ):
        torch.save({"model": theirs | change}, tmp_path / "y.pth")
        assert sentence in refused(tmp_path / "y.pth")
    torch.save({"model": released_experts(4, blocks=[(1, 0)])}, tmp_path / "y.pth")
    assert "blocks (stage, index) [(1, 0)], which no values of --moe-freq" in refused(tmp_path / "y.pth")


def test_a_released_swin_model_is_upcycled_and_converted_back_to_dense(released_file, tmp_path):
    source, dense, moe, back = released_file("moe"), *(tmp_path / f"{n}.pt" for n in "abc")
    said = convert("swin", "--input", source, "--output", dense)
    assert "form moe" in said and "5 classes, images of 3 x 16 x 16" in said
    words = ["--moe-expert-count", "3", "--moe-freq", "1", "--moe-top-k", "2"]
    said = convert("upcycle", "--input", dense, "--output", moe, *words)
    assert "3 experts of 64, top-2, in stages_1_0, stages_1_1, stages_2_0" in said
    assert "its initial outputs equal the dense model's outputs up to rounding" in said
    model, _ = opened(moe)
    assert [layer.label for layer in moe_layers(model)] == ["stages_1_0", "stages_1_1", "stages_2_0"]
    last = convert("upcycle", "--input", dense, "--output", back, *words, "--swin-expert-stages", 1)
    assert "top-2, in stages_2_0\n" in last
    back.unlink()
    images = torch.randn(2, 3, 16, 16)
    expected = opened(dense)[0](images)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    convert("dense", "--input", moe, "--output", back, "--experts", "0")
    torch.testing.assert_close(opened(back)[0](images), expected)


def test_convert_swin_raises_an_error_for_files_that_are_not_a_released_model(tmp_path):
    theirs = released("v2")
    for change, sentence in (
        (lambda m: m.clear(), "is not a Swin"),
        (lambda m: m.pop("layers.2.blocks.0.attn.cpb_mlp.2.weight"), "lacks the weight layers.2.blocks.0"),
        (
            lambda m: m.pop("layers.1.blocks.1.norm1.bias"),
            "(16,) for stages.1.blocks.1.norm1.bias",
        ),
        (
            lambda m: m.update(absolute_pos_embed=torch.ones(1)),
            "instead of None for absolute_pos_embed",
        ),
        (
            lambda m: m.update({"head.bias": torch.ones(3)}),
            "the shape (3,) instead of (5,)",
        ),
    ):
        changed = dict(theirs)
        change(changed)
        torch.save({"model": changed}, tmp_path / "bad.pth")
        assert sentence in refused(tmp_path / "bad.pth")
    words = ("swin", tmp_path / "bad.pth", "--output", tmp_path / "o.pt", "--classes", 0)
    assert "--classes is 0" in refusal(*words)
