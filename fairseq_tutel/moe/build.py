"""Loads custom classes, and initializes parameters equally for every number of ranks."""

import hashlib
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


def load_class(name: str | type) -> Any:
    """Return a class that is given directly, or by its name as in package.module.Class."""
    if isinstance(name, type):
        return name
    module_name, _, class_name = name.rpartition(".")
    return getattr(importlib.import_module(module_name), class_name)


def build_custom(name: str | type, config: Any) -> nn.Module:
    """Build a module of a custom class, and store `config` in it, so that `redraw` can build it again."""
    module: Any = load_class(name)(config)
    module.moe_config = config
    return module


@torch.no_grad()
def redraw(module: Any, seed: int) -> None:
    """Reinitialize the parameters of a module that `build_custom` built, from this seed."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return
    module.load_state_dict(draw(type(module), module.moe_config, seed).state_dict())


def draw(kind: Callable[[Any], nn.Module], config: Any, seed: int) -> nn.Module:
    """Call kind(config) on the CPU with this seed; then restore the state of torch's random generator."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
        return kind(config)


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a `forward` function that a library set on the object."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    has_hooks = bool(before or after or module._backward_pre_hooks or module._backward_hooks)
    return has_hooks or "forward" in vars(module) or _has_any_global_hook()


def seeded_generator(seed: int, name: str, expert: int, tensor: str) -> torch.Generator:
    """Return a CPU generator seeded by a hash of the arguments; `expert` is -1 for non-expert tensors."""
    return torch.Generator().manual_seed(hashed_seed(seed, name, expert, tensor))


def hashed_seed(seed: int, name: str, expert: int, tensor: str) -> int:
    """Return a signed 64-bit seed computed as a hash of the arguments."""
    digest = hashlib.sha256(f"{seed}/{name}/{expert}/{tensor}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def draw_linear(
    target: Tensor, fan_in: int, kind: str, init_std: float, generator: torch.Generator
) -> None:
    """Draw a weight or bias as nn.Linear does. If `init_std` > 0, weights are normal, and biases are 0."""
    values = torch.zeros(target.shape, dtype=torch.float32)  # on the CPU, as `generator` is
    if init_std == 0:
        bound = 1 / math.sqrt(fan_in)
        nn.init.uniform_(values, -bound, bound, generator=generator)
    elif kind == "weight":
        nn.init.normal_(values, std=init_std, generator=generator)
    target.copy_(values)
