"""The transfer dtype `same` keeps all bits, and the transfer dtypes bf16 and fp8 round values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_tutel.moe.config import LAYER
from fairseq_tutel.parallel.transfer import pack, unpack


def through(rows, form):
    return unpack(pack(rows, form), form, rows.dtype)


def rows_of(num=64, width=24, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num + width)
    return (scale * torch.randn(num, width, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
def test_the_transfer_dtype_same_keeps_all_bits(dtype):
    rows = rows_of(dtype=dtype)
    assert pack(rows, "same") is rows
    assert torch.equal(through(rows, "same"), rows)


@pytest.mark.parametrize("scale", (1.0, 1e-20, 1e20, 1e30))
@pytest.mark.parametrize("wire, error", [("bf16", 2**-8), ("fp8", 2**-4)])
def test_the_error_is_limited_by_the_precision_of_the_transfer_dtype(wire, error, scale):
    rows = rows_of(scale=scale)
    largest = rows.abs().amax(1, keepdim=True)
    # The limit is half a unit in the last place of an element, and for fp8 also half of the smallest step.
    bound = error * rows.abs() + (largest * 2**-10 / 448 if wire == "fp8" else 0)
    assert ((through(rows, wire) - rows).abs() <= bound).all()


@given(st.floats(width=32), st.sampled_from(LAYER["a2a_dtype"].choices))
def test_a_transfer_dtype_keeps_finite_values_finite_and_nonfinite_values_nonfinite(value, wire):
    rows = torch.tensor([[value, 0.5]])
    got = through(rows, wire)
    if rows.isfinite().all():
        assert got.isfinite().all() or (wire == "bf16" and abs(value) > 3.3e38)
    else:
        assert not got.isfinite().all()
