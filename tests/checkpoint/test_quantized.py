"""Experts in fewer bits: within half a step of what they were, read by whatever reads shards, and said.

Covered: every packing of odd and even widths, rows of zeros, dtypes; the errors that records hold, also by
row blocks; any part of any cut; `convert sharded --expert-dtype` and back, what of a checkpoint stays;
`inspect`; refusals.
"""

import json

import pytest
import torch
from moe_files import D, E, H, save
from tool_in_process import convert, refusal, tool
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_tutel.checkpoint import quantized as packed
from fairseq_tutel.checkpoint import shards
from fairseq_tutel.checkpoint.quantized import LARGEST, PACKINGS, Packed, RoundingError
from fairseq_tutel.ranks.groups import Slice, cut

BITS = {"bf16": 16, "int8": 8, "int4": 4}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shape", [(5, 8), (3, 7), (2, 3, 1), (0, 4)])
def test_numbers_come_back_to_half_a_step(packing, shape):
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    values[:1] = 0
    form = Packed(packing, shape, torch.float32)
    stored = form.pack(values)
    assert (stored.dtype, tuple(stored.shape)) == (form.stored_dtype, form.stored_shape)
    got = form.unpack(stored)
    steps = values.abs() / 2**7
    if packing in LARGEST:
        steps = values.abs().amax(-1, keepdim=True) / LARGEST[packing]
    assert torch.all((got - values).abs() <= steps * 0.5001)
    assert torch.equal(form.unpack(form.pack(got)), got)  # rounding again changes nothing
    of_half = Packed(packing, shape, torch.float16)
    assert torch.equal(of_half.unpack(stored), got.half())


def test_errors_are_what_they_are_called():
    values, rounded = torch.tensor([[3.0, 4], [0, 0]]), torch.tensor([[3.0, 4.5], [0, 0]])
    error = RoundingError()
    error.add(values, values)
    error.add(values, rounded)
    assert error.relative == pytest.approx(0.5 / 50**0.5)
    assert error.worst_row == pytest.approx(0.1)


class LargestFloat64(TorchDispatchMode):
    """Remembers the most numbers that a tensor in float64 has had."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            self.found = max(self.found, out.numel())
        return out


def test_errors_of_a_large_tensor_are_those_of_its_row_blocks(monkeypatch):
    values = torch.randn(3, 7, 10)
    rounded, whole, by_rows = values + 0.1 * torch.randn(3, 7, 10), RoundingError(), RoundingError()
    whole.add(values, rounded)
    monkeypatch.setattr(packed, "BLOCK", 45)  # of which the last block is not full
    with LargestFloat64() as largest:
        by_rows.add(values, rounded)
    assert largest.found == 40
    assert by_rows.relative == pytest.approx(whole.relative)
    assert by_rows.worst_row == pytest.approx(whole.worst_row)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_checkpoint_is_read_as_any_other(packing, tmp_path):
    plain, path, full = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt"))
    save(plain)
    told = convert("sharded", "--input", plain, "--output", path, "--expert-dtype", packing)
    convert("full", "--input", path, "--output", full)
    before, after = (torch.load(file, weights_only=False)["model"] for file in (plain, full))
    state = torch.load(path, weights_only=False)
    shards.bind(state, path)
    facts = json.loads(tool("inspect", path, "--check", "--json"))
    layer = facts["layers"][0]
    assert layer["stored"] == packing
    scales = 0 if packing == "bf16" else 4 * (H + D)
    assert layer["bytes"] == E * (2 * H * D * BITS[packing] // 8 + scales + 4 * (H + D))
    for key, values in before.items():
        if ".experts.fc" not in key or key.endswith("bias"):
            assert torch.equal(after[key], values)
            continue
        assert not torch.equal(after[key], values)
        relative = float((after[key] - values).norm() / values.norm())
        rows = (after[key] - values).norm(dim=2) / values.norm(dim=2)
        assert state["model"][key].error == pytest.approx((relative, float(rows.max())), rel=1e-4)
        assert f"{key}: relative error {relative:.2e}, of the worst row" in told
        for index in range(2):
            part = state["model"][key].read(1, 2, Slice(2, 2), index)
            assert torch.equal(part, cut(after[key][1:3], Slice(2, 2), index))
    text = tool("inspect", path)
    assert f"float32 in {packing}: error {max(layer['relative_error'].values()):.1e}, " in text


def test_numbers_that_no_scale_fits_are_refused(tmp_path):
    path = save(tmp_path / "a.pt")
    state = torch.load(path, weights_only=False)
    key = next(key for key in state["model"] if key.endswith("fc2_weight"))
    state["model"][key][1, 2, 3] = float("inf")
    torch.save(state, path)
    words = ("--input", path, "--output", tmp_path / "b.pt", "--expert-dtype", "int8")
    assert refusal("sharded", *words) == (
        f"--expert-dtype int8 cannot store expert 1 of {key}: it holds numbers that are not finite; leave "
        "the option out."
    )
    assert list(tmp_path.iterdir()) == [path]
