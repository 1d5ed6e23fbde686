"""Initial values: every tensor from a generator of its own, so that a model is the same for every W."""

import hashlib
import math

import torch
from torch import Tensor, nn


def seeded_generator(seed: int, name: str, expert: int, tensor: str) -> torch.Generator:
    """Return a CPU generator seeded by a hash of its arguments; expert -1 is what all experts share."""
    return torch.Generator().manual_seed(hashed_seed(seed, name, expert, tensor))


def hashed_seed(seed: int, name: str, expert: int, tensor: str) -> int:
    """Return a signed 64-bit seed from a hash of its arguments."""
    digest = hashlib.sha256(f"{seed}/{name}/{expert}/{tensor}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def draw_linear(
    target: Tensor, fan_in: int, kind: str, init_std: float, generator: torch.Generator
) -> None:
    """Fill a weight or bias in place as nn.Linear does, or, by `init_std`, normal with zero biases.

    Args:
        target: any device and float dtype; drawn in fp32 on CPU.
        fan_in: the linear map's input dimension.
        kind: "weight" or "bias".
        init_std: standard deviation of weights; 0 for nn.Linear's own rule.
        generator: on CPU.
    """
    values = torch.zeros(target.shape, dtype=torch.float32)
    if init_std == 0:
        bound = 1 / math.sqrt(fan_in)
        nn.init.uniform_(values, -bound, bound, generator=generator)
    elif kind == "weight":
        nn.init.normal_(values, std=init_std, generator=generator)
    target.copy_(values)
