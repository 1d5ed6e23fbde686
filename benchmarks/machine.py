"""The environment of a result: versions, device, threads, precision."""

import importlib.metadata
import os
from typing import Any

import torch

from benchmarks.output import BadOption


def facts(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return facts for a result's file; nothing in them names the machine."""
    return {
        "torch": importlib.metadata.version("torch"),
        "triton": _triton_version(),
        "device": _name(device),
        "cores": os.cpu_count(),
        "dtype": name_of(dtype),
    }


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def device_of(name: str) -> torch.device:
    """Return the device that --device names.

    Raises:
        BadOption: it is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise BadOption("--device is cuda but torch sees no GPU here; give --device cpu.")
    return torch.device(name)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def _triton_version() -> str | None:
    """Return it by the module, whose package has another name for ROCm."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
