"""The tests check the rounding errors of quantized experts, and read quantized checkpoints."""

import json

import pytest
import torch
from moe_files import D, E, H, save
from stored import WIDE, model_of, opened, source_of, write
from tool_in_process import convert, tool

from fairseq_tutel import ExpertStore
from fairseq_tutel.checkpoint import shards
from fairseq_tutel.checkpoint.quantized import EXPERT_DTYPES, LARGEST, Quantized
from fairseq_tutel.parallel.groups import Slice, cut

BITS = {"bf16": 16, "int8": 8, "int4": 4}


@pytest.mark.parametrize("expert_dtype", EXPERT_DTYPES)
@pytest.mark.parametrize("shape", [(5, 8), (3, 7), (2, 3, 1), (0, 4)])
def test_rounding_errors_of_quantized_weights_are_at_most_half_a_quantization_step(expert_dtype, shape):
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    values[:1] = 0
    form = Quantized(expert_dtype, shape, torch.float32)
    stored = form.quantize(values)
    assert (stored.dtype, tuple(stored.shape)) == form.stored
    got = form.dequantize(stored)
    steps = values.abs() / 2**7
    if expert_dtype in LARGEST:
        steps = values.abs().amax(-1, keepdim=True) / LARGEST[expert_dtype]
    assert torch.all((got - values).abs() <= steps * 0.5001)
    assert not got[:1].signbit().any()  # The sign of 0 is positive.
    assert torch.equal(form.dequantize(form.quantize(got)), got)  # Quantizing again changes nothing.
    of_half = Quantized(expert_dtype, shape, torch.float16)
    assert torch.equal(of_half.dequantize(stored), got.half())


@pytest.mark.parametrize("expert_dtype", EXPERT_DTYPES)
def test_a_quantized_checkpoint_can_be_read_like_other_checkpoints(expert_dtype, tmp_path):
    plain, path, full = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt"))
    save(plain)
    told = convert("sharded", "--input", plain, "--output", path, "--expert-dtype", expert_dtype)
    convert("full", "--input", path, "--output", full)
    before, after = (torch.load(file, weights_only=False)["model"] for file in (plain, full))
    state = torch.load(path, weights_only=False)
    shards.bind(state, path)
    facts = json.loads(tool("inspect", path, "--check", "--json"))
    layer = facts["layers"][0]
    assert layer["stored"] == expert_dtype
    scales = 0 if expert_dtype == "bf16" else 4 * (H + D)
    assert layer["bytes"] == E * (2 * H * D * BITS[expert_dtype] // 8 + scales + 4 * (H + D))
    for key, values in before.items():
        if ".experts.fc" not in key or key.endswith("bias"):
            assert torch.equal(after[key], values)
            continue
        assert not torch.equal(after[key], values)
        relative = float((after[key] - values).norm() / values.norm())
        rows = (after[key] - values).norm(dim=2) / values.norm(dim=2)
        assert state["model"][key].error == pytest.approx((relative, float(rows.max())), rel=1e-4)
        assert f"{key}: relative error {relative:.2e}, worst row's error" in told
        for index in range(2):
            part = state["model"][key].read(1, 2, Slice(2, 2), index)
            assert torch.equal(part, cut(after[key][1:3], Slice(2, 2), index))
    text = tool("inspect", path)
    assert f"float32 in {expert_dtype}: error {max(layer['relative_error'].values()):.1e}, " in text


def test_int4_in_groups_uses_the_better_of_two_scales_in_each_group():
    values = torch.randn(128, 192) * torch.logspace(-2, 2, 192)
    values[5] = 0
    form = Quantized("int4", (128, 192), torch.float32)
    stored = form.quantize(values)
    assert stored.nbytes == 128 * 192 // 2 + 2 * 128 * 3 and form.in_groups
    got = form.dequantize(stored)
    for row in range(0, 128, 5):
        for group in values[row].split(64):
            ways = []
            for steps in (-8, -9):
                scale = (group[group.abs().argmax()] / steps).bfloat16().float()
                ways.append((group / scale).round().clamp(-8, 7) * scale if scale else group)
            best = min(ways, key=lambda way: float((way - group).square().sum()))
            torch.testing.assert_close(got[row, : len(best)], best, rtol=0, atol=0)
            got[row] = got[row].roll(-64)
    again = form.dequantize(stored)
    assert torch.equal(form.dequantize(form.quantize(again)), again)  # Quantizing again changes nothing.
    half = Quantized("int4", (128, 192), torch.float16)
    assert torch.equal(half.dequantize(stored), again.half())


def test_files_with_one_int4_scale_per_row_are_still_read(tmp_path, monkeypatch):
    model = model_of(WIDE)
    (tmp_path / "new").mkdir()
    new = source_of(write(model, tmp_path / "new", "int4"))[0]["fc1_weight"]
    with monkeypatch.context() as patch:
        patch.setattr(Quantized, "in_groups", False)  # Older versions wrote one scale per row.
        (tmp_path / "old").mkdir()
        write(model, tmp_path / "old", "int4")
    old = source_of(tmp_path / "old")[0]["fc1_weight"]
    assert (new.record()["expert_shards"], old.record()["expert_shards"]) == (3, 2)
    assert (new.record()["packing"], old.record()["packing"]) == ("int4", "int4")
    assert old.quantized == Quantized("int4", old.shape[1:], torch.float32, in_rows=True)
    weights = model[0].experts.fc1_weight.detach()
    errors = [float((tensor.whole() - weights).norm() / weights.norm()) for tensor in (new, old)]
    assert errors[0] < errors[1] < 0.2
    assert errors == pytest.approx([new.error[0], old.error[0]], rel=1e-4)
    assert torch.equal(new.read(1, 2, Slice(2, 2), 1), cut(new.whole()[1:3], Slice(2, 2), 1))


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(content[:-100])
        return
    header = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + header])["2.fc1_weight"]["data_offsets"][0]
    content[8 + header + begin + 1] ^= 64  # This bit is in the exponent of the first scale.
    path.write_bytes(content)


@pytest.mark.parametrize("packing", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["a scale", "truncated"])
def test_the_error_for_a_damaged_quantized_file_names_the_file(tmp_path, packing, kind):
    for path in write(model_of(WIDE), tmp_path, packing).rglob("*.safetensors"):
        damage(path, kind)
    source = source_of(tmp_path)
    with pytest.raises(ValueError, match=r"which is corrupt or missing \(.*\); give an older "):
        source[0]["fc1_weight"].read(2, 1)
    with ExpertStore() as store, torch.no_grad():
        model = opened(WIDE, store, source)
        reason = "is not what was saved" if kind == "a scale" else "it is truncated"
        with pytest.raises(ValueError, match=rf"experts\.safetensors, which is corrupt.* \(.*{reason}"):
            model[0](torch.randn(50, 64))
