"""`convert swin`: released Swin V2 checkpoints, by names and shapes, with drawn weights.

Covered: both forms open in fairseq with every weight in its place and the sizes that the file says; a
window trained at another scale; a new head; experts of it by `convert upcycle`, and back; what is no
such file.
"""

import math
import sys
import types

import pytest
import torch
from fairseq import checkpoint_utils
from tool_in_process import convert, refusal

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.feed_forward import moe_layers

register()
DEPTHS, HEADS, DIM, PATCH, CLASSES = (1, 2, 1), (1, 2, 4), 8, 2, 5


def offsets(window, trained):
    """Return the released table of offsets [1, 2w-1, 2w-1, 2]."""
    line = torch.arange(1.0 - window, window) / (trained - 1) * 8
    table = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).unsqueeze(0)
    return table.sign() * torch.log2(table.abs() + 1) / math.log2(8)


def released(form, windows=(4, 4, 2), trained=None, mlp_ratio=4):
    """Return a released model's state dict, as its code names it, of drawn numbers."""
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
            index = torch.zeros(window**2, window**2, dtype=torch.int64)
            tables[f"{block}.attn.relative_position_index"] = index
            if j % 2:
                tables[f"{block}.attn_mask"] = torch.zeros(4, window**2, window**2)
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


@pytest.fixture
def released_file(tmp_path):
    """Return a function that writes a released file."""

    def write(*args, **kwargs):
        torch.save({"model": released(*args, **kwargs)}, tmp_path / "released.pth")
        return tmp_path / "released.pth"

    return write


def opened(path):
    """Return the model of a checkpoint, and its task, as every command of fairseq opens it."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return models[0].eval(), task


def test_a_released_model_opens_with_every_weight_in_its_place(released_file, tmp_path):
    """And with a new head, and a finer window than it was trained with at first."""
    how, output = {"windows": (8, 8, 4), "trained": (4, 4, 4), "mlp_ratio": 2}, tmp_path / "ours.pt"
    source = released_file("v2", **how)
    said = convert("swin", "--input", source, "--output", output, "--classes", 7)
    assert "form v2" in said and "7 classes, images of 3 x 32 x 32" in said
    model, task = opened(output)
    theirs, ours = released("v2", **how), model.state_dict()
    for name, place in {
        "patch_embed.proj.weight": "patch_embed.proj.weight",
        "layers.1.blocks.1.mlp.fc2.bias": "stages.1.blocks.1.fc2.bias",
        "layers.1.blocks.0.attn.cpb_mlp.2.weight": "stages.1.blocks.0.attn.cpb_mlp.2.weight",
        "layers.0.downsample.reduction.weight": "stages.0.downsample.reduction.weight",
        "layers.2.blocks.0.norm2.weight": "stages.2.blocks.0.norm2.weight",
        "norm.bias": "norm.bias",
    }.items():
        assert torch.equal(ours[place], theirs[name]), name
    attn, last = model.stages[0].blocks[0].attn, model.stages[2].blocks[0].attn
    assert (attn.cpb_mlp.trained_window, last.cpb_mlp.trained_window) == (4, 0)
    assert task.num_classes == 7 and task.channels == 3
    assert torch.equal(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, 7))


def test_experts_are_made_of_a_released_model_and_it_of_them(released_file, tmp_path):
    source, dense, moe, back = released_file("moe"), *(tmp_path / f"{n}.pt" for n in "abc")
    said = convert("swin", "--input", source, "--output", dense)
    assert "form moe" in said and "5 classes, images of 3 x 16 x 16" in said
    words = ["--moe-expert-count", "3", "--moe-freq", "1", "--moe-top-k", "2"]
    said = convert("upcycle", "--input", dense, "--output", moe, *words)
    assert "3 experts of 64, top-2, in stages_1_0, stages_1_1, stages_2_0" in said
    assert "its first output is the dense model's, to rounding" in said
    model, _ = opened(moe)
    assert [layer.label for layer in moe_layers(model)] == [
        "stages_1_0",
        "stages_1_1",
        "stages_2_0",
    ]
    last = convert("upcycle", "--input", dense, "--output", back, *words, "--swin-expert-stages", 1)
    assert "top-2, in stages_2_0\n" in last
    back.unlink()
    images = torch.randn(2, 3, 16, 16)
    expected = opened(dense)[0](images)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    convert("dense", "--input", moe, "--output", back, "--experts", "0")
    torch.testing.assert_close(opened(back)[0](images), expected)


def test_the_released_dense_layout_of_swin_moe_has_no_fc2_bias(released_file, tmp_path):
    """Its missing biases are zeros: equal to a file that has them as zeros."""
    theirs, made = released("moe"), []
    zero = {k: torch.zeros_like(v) if k.endswith("fc2.bias") else v for k, v in theirs.items()}
    without = {k: v for k, v in theirs.items() if not k.endswith("fc2.bias")}
    for name, model in (("zero", zero), ("without", without)):
        torch.save({"model": model}, tmp_path / f"{name}.pth")
        output = tmp_path / f"{name}.pt"
        convert("swin", "--input", tmp_path / f"{name}.pth", "--output", output)
        made.append(opened(output)[0](torch.ones(1, 3, 16, 16)))
    assert torch.equal(*made)


def test_a_configuration_beside_the_weights_runs_nothing(tmp_path, monkeypatch):
    """Released checkpoints hold a yacs.config.CfgNode, which here need not be installed."""
    module, package = types.ModuleType("yacs.config"), types.ModuleType("yacs")
    node = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    module.CfgNode = node
    config = node(MODEL=node(TYPE="swinv2"))
    config.frozen = True
    with monkeypatch.context() as installed:
        installed.setitem(sys.modules, "yacs", package)
        installed.setitem(sys.modules, "yacs.config", module)
        state = {"model": released("v2"), "config": config, "epoch": 3, "max_accuracy": 1.0}
        torch.save(state, tmp_path / "released.pth")
    words = ("--input", tmp_path / "released.pth", "--output", tmp_path / "ours.pt")
    assert "5 classes" in convert("swin", *words)
    assert "config" not in torch.load(tmp_path / "ours.pt", weights_only=True)


def test_a_map_picks_classes_of_the_head(released_file, tmp_path):
    (tmp_path / "map.txt").write_text("4\n0\n")
    words = ("--input", released_file("v2"), "--output", tmp_path / "o.pt")
    assert "2 classes" in convert("swin", *words, "--class-map", tmp_path / "map.txt")
    ours, theirs = opened(tmp_path / "o.pt")[0].state_dict(), released("v2")
    for name in ("head.weight", "head.bias"):
        assert torch.equal(ours[name], theirs[name][[4, 0]])
    (tmp_path / "map.txt").write_text("5\n")
    (tmp_path / "o.pt").unlink()
    assert "names class 5, but" in refusal("swin", *words, "--class-map", tmp_path / "map.txt")


def test_what_is_no_released_model_is_refused(released_file, tmp_path):
    def of(change, **words):
        model = released("v2")
        change(model)
        torch.save({"model": model}, tmp_path / "bad.pth")
        said = [word for pair in words.items() for word in (f"--{pair[0]}", pair[1])]
        return refusal(
            "swin", "--input", tmp_path / "bad.pth", "--output", tmp_path / "o.pt", *said
        )

    assert "holds no Swin" in of(dict.clear)
    assert "lacks layers.2.blocks.0.attn.cpb_mlp.2.weight" in of(
        lambda m: m.pop("layers.2.blocks.0.attn.cpb_mlp.2.weight")
    )
    assert "lacks stages.1.blocks.1.norm1.bias" in of(
        lambda m: m.pop("layers.1.blocks.1.norm1.bias")
    )
    assert "has absolute_pos_embed" in of(lambda m: m.update(absolute_pos_embed=torch.ones(1)))
    assert "shape (3,), where the others ask for (5,)" in of(
        lambda m: m.update({"head.bias": torch.ones(3)})
    )
    assert "--classes is 0" in of(lambda m: None, classes=0)
