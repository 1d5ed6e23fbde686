"""The tool `env` prints versions, devices, backends and the reasons for each backend, for a bug report."""

import argparse
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fairseq_tutel.moe.config import LAYER

PACKAGES = (
    "fairseq-tutel", "torch", "fairseq-fixed", "numpy", "triton", "hydra-core", "omegaconf",
    "sacrebleu", "sentencepiece", "matplotlib", "pillow",
)  # fmt: skip


def add_to(tools: Any) -> None:
    """Add the tools `env` and `user-dir`; `user-dir` prints the folder of this package."""
    tools.add_parser("env", description=__doc__).set_defaults(run=run)
    text = "user-dir: print the folder to give fairseq as --user-dir."
    parser = tools.add_parser("user-dir", description=text)
    parser.set_defaults(run=lambda _: print(Path(__file__).resolve().parents[1]))


def run(arguments: argparse.Namespace) -> None:
    """Print versions, devices and the backends that a run on this machine would use."""
    sections = {"versions": _versions(), "devices": _devices(), "chosen here": _choices()}
    for title, lines in sections.items():
        print(title)
        for name, value in lines:
            print(f"  {name}: {value}")


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "system", platform.platform()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    import torch
    import torch.distributed as dist

    capability = torch.backends.cpu.get_cpu_capability()
    yield "cpu", f"{torch.get_num_threads()} threads, {capability}"
    kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        built = torch.version.hip or torch.version.cuda
        yield "gpu", f"none found (torch is {f'built for {kind}' if built else 'a CPU build'})"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = facts.total_memory / 2**30
        yield f"gpu {index}", f"{facts.name}, {memory:.0f} GiB, {kind}"
    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    yield "torch.distributed", ", ".join(backends)


def _choices() -> Iterator[tuple[str, str]]:
    """Yield the backends and settings that a run with default flags would use, with the reasons."""
    import torch

    from fairseq_tutel.kernels import backend_for

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    for requested in LAYER["backend"].choices:
        try:
            choice = "{}, since: {}".format(*backend_for(requested, device))
        except ValueError as error:
            choice = f"not available: {error}"
        yield f"kernels (--moe-backend {requested})", choice
    if on_gpu:
        yield "backend of torch.distributed", "nccl, since there is a GPU"
    else:
        yield "backend of torch.distributed", "gloo, with --ddp-backend legacy_ddp, since there is no GPU"
        yield "precisions", "not --fp16, which needs a GPU"
