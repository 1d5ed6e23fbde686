"""Weights of a wrong dtype are refused; `walk` visits each container of a file once."""

import pytest
import torch

from fairseq_tutel.checkpoint.files import walk
from fairseq_tutel.checkpoint.foreign import refuse_malformed


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_an_integer_or_complex_weight_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"^x\.pt has .*{dtype} as the weight 'fc1\.weight'; give"):
        refuse_malformed({"model": {"fc1.weight": torch.ones(2, dtype=dtype)}}, "x.pt")
    refuse_malformed({"model": {"attn.bias": torch.ones(2, dtype=torch.bool)}}, "x.pt")


def test_every_entry_is_visited_once_even_if_a_container_contains_itself():
    shared = {"c": 1}
    tree = {"a": [shared, (shared, 2)], "b": shared}
    tree["self"] = tree
    assert sorted((str(key), value) for _, key, value in walk(tree) if isinstance(value, int)) == [
        ("1", 2),
        ("c", 1),
    ]
