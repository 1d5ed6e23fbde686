"""Returns the environment of a measurement: versions, device, threads, precision."""

import importlib.metadata
import os
from typing import Any

import torch

from benchmarks.output import BadOption


def facts(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the environment for the --json file; it does not contain the name of the machine."""
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
        BadOption: this machine does not have the device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise BadOption("--device is cuda but torch sees no GPU here; give --device cpu.")
    return torch.device(name)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def _triton_version() -> str | None:
    """Return Triton's version from its module, because its package has another name for ROCm."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
