"""Makes parameters of different sizes, including experts, and gradients that depend on the rank."""

import torch
from torch import nn

from fairseq_tutel.parallel.gradients import mark_expert


def some_parameters(dtype=torch.float64):
    """Return parameters, of which only some have an even number of elements."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (), (3,), (8,), (1, 1), (4, 2, 3), (0,), (13,)]
    made = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]
    for parameter in made[4:6]:
        mark_expert(parameter)
    return made


def gradient_of(parameter, number, rank):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def backward(parameters, rank, skipped=(), turn=0):
    """Run a backward pass that sets the gradient of every parameter except the skipped ones."""
    numbers = [i for i in range(len(parameters)) if i not in skipped]
    # Ranks may compute gradients in different orders.
    numbers = numbers[turn:] + numbers[:turn]
    loss = sum((parameters[i] * gradient_of(parameters[i], i, rank)).sum() for i in numbers)
    loss.backward()
