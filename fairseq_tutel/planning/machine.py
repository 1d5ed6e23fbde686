"""Hardware profiles: speed of links, memory and arithmetic, measured, given, or of a known GPU."""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fairseq_tutel.files.small import json_of

_FLAGS = {"inter_shared", "reduce_scatter_as_all_reduce"}


@dataclass(frozen=True)
class Link:
    """A link of a rank."""

    alpha_s: float  # of each message
    bytes_per_s: float  # in one direction

    def seconds(self, messages: float, num_bytes: float) -> float:
        """Return the seconds of messages with a total of bytes."""
        return messages * self.alpha_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware profile of one rank."""

    name: str
    intra: Link  # of a rank within its node
    inter: Link  # of a rank to other nodes, or of a node if `inter_shared`
    memory_bytes_per_s: float  # reads and writes together
    flops_per_s: float  # achieved by the experts
    gate_flops_per_s: float  # of the gate, in fp32
    memory_bytes: float
    launch_s: float = 0.0  # of a collective, before its first message
    inter_shared: bool = False  # the ranks of a node share one link to other nodes
    reduce_scatter_as_all_reduce: bool = False  # a reduce-scatter costs an all-reduce, as in gloo

    def to_json(self, path: Path) -> None:
        """Write the file of `plan --machine` and --moe-machine-file."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: Path) -> "Machine":
        """Read a hardware profile.

        Raises:
            ValueError: the file is missing or no JSON, or a key is missing, unknown or has a wrong value.
        """
        fix = "give a file of `tune --json`"
        try:
            values = json_of(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a hardware profile ({error}); {fix}.") from error
        known = {field.name for field in fields(cls)}
        optional = {"launch_s", *_FLAGS}
        if not isinstance(values, dict) or not known - optional <= set(values) <= known:
            found = set(values) if isinstance(values, dict) else set()
            wrong = sorted((known - optional - found) | (found - known))
            raise ValueError(
                f"{path} is no hardware profile: {', '.join(wrong)} missing or unknown; {fix}."
            )
        for key in ("intra", "inter"):
            link = values[key]
            if not isinstance(link, dict) or set(link) != {"alpha_s", "bytes_per_s"}:
                raise ValueError(f"{path} has {key} {link!r}; it needs alpha_s and bytes_per_s.")
            _check_number(path, f"{key}.bytes_per_s", link["bytes_per_s"])
            _check_number(path, f"{key}.alpha_s", link["alpha_s"], may_be_0=True)
            values[key] = Link(**link)
        for key in known - optional - {"name", "intra", "inter"}:
            _check_number(path, key, values[key])
        _check_number(path, "launch_s", values.get("launch_s", 0), may_be_0=True)
        for key in _FLAGS & set(values):
            if not isinstance(values[key], bool):
                raise ValueError(f"{path} has {key} {values[key]!r}; give true or false.")
        return cls(**values)


def _check_number(path: Path, key: str, value: Any, may_be_0: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value >= 0 if may_be_0 else value > 0):
        fix = "seconds, from 0" if may_be_0 else "a number above 0"
        raise ValueError(f"{path} has {key} {value!r}; give {fix}.")


# Achieved parts of datasheet numbers, from measurements; docs/scaling.md lists the sources.
# NVLink: 370 of 450 GB/s on H100, "protocol overhead (~20%)" (NVIDIA/nccl-tests issue 212).
_NVLINK = 370 / 450
# InfiniBand: 46 to 48 of 50 GB/s per NDR adapter (NVIDIA/nccl-tests issue 290).
_INFINIBAND = 47 / 50
# bf16: forward and backward of a Triton MoE layer, 413 of 989 TFLOP/s on H100 (Liger-Kernel PR 1294).
_EXPERTS = 413 / 989
# A collective of the smallest size on 8 GPUs takes 10.5 us (deepseek-ai/DeepEP issue 303).
_LAUNCH_S = 10e-6
# NCCL's own model of an NVLink step, LL protocol (NVIDIA/nccl issue 1334, src/graph/tuning.cc).
_INTRA_ALPHA_S = 0.6e-6
# Cost of a message among many in flight. No source gives it: with this value 2DH overtakes linear between
# 128 and 256 A100s at 32 MiB a rank, close to Tutel's maintainer ("at least over 256", microsoft/Tutel
# issue 214).
_INTER_ALPHA_S = 1.0e-6


def _preset(
    name: str,
    *,
    intra_gb_s: float,
    inter_gb_s: float,
    memory_gb_s: float,
    tflops: float,
    fp32_tflops: float,
    memory_gb: float,
) -> Machine:
    return Machine(
        name=name,
        intra=Link(_INTRA_ALPHA_S, intra_gb_s * 1e9 * _NVLINK),
        inter=Link(_INTER_ALPHA_S, inter_gb_s * 1e9 * _INFINIBAND),
        memory_bytes_per_s=memory_gb_s * 1e9,
        flops_per_s=tflops * 1e12 * _EXPERTS,
        gate_flops_per_s=fp32_tflops * 1e12,
        memory_bytes=memory_gb * 1e9,
        launch_s=_LAUNCH_S,
    )


# Datasheet numbers of one GPU, in one direction.
PRESETS = {
    # NDm A100 v4: 8 x A100-80GB, NVLink 3 at 300 GB/s, one 200 Gb/s HDR adapter a GPU.
    "a100": _preset(
        "A100", intra_gb_s=300, inter_gb_s=25, memory_gb_s=2039, tflops=312, fp32_tflops=19.5,
        memory_gb=80,
    ),
    # DGX H100: NVLink 4 at 450 GB/s, one 400 Gb/s NDR adapter a GPU.
    "h100": _preset(
        "H100", intra_gb_s=450, inter_gb_s=50, memory_gb_s=3350, tflops=989, fp32_tflops=67,
        memory_gb=80,
    ),
    # The H100's processor and links with HBM3e.
    "h200": _preset(
        "H200", intra_gb_s=450, inter_gb_s=50, memory_gb_s=4800, tflops=989, fp32_tflops=67,
        memory_gb=141,
    ),
    # One of the two dies (GCD) of a module, 16 a node. xGMI has seven links of 50 GB/s and no switch: an
    # even all-to-all of 16 reaches at most 15 * 75 / 16 GB/s (a linear program over the links). 16 GB/s of
    # InfiniBand a die, as in the ForestColl paper.
    "mi250": _preset(
        "MI250 (one die)", intra_gb_s=15 * 75 / 16, inter_gb_s=16, memory_gb_s=3276.8 / 2,
        tflops=362.1 / 2, fp32_tflops=45.3 / 2, memory_gb=64,
    ),
}  # fmt: skip

# A rank on a CPU, by orders of magnitude: loopback, 10 Gb/s Ethernet of a node, FLOP/s of a core.
CPU = Machine(
    name="CPU",
    intra=Link(20e-6, 2e9),
    inter=Link(50e-6, 1.25e9),
    memory_bytes_per_s=4e9,
    flops_per_s=8e10,
    gate_flops_per_s=8e10,
    memory_bytes=8e9,
    inter_shared=True,
    reduce_scatter_as_all_reduce=True,
)


def typical(gpu: str | None) -> Machine:
    """Return the profile of a GPU by its name, of an A100 if it is unknown, or of a CPU for None."""
    if gpu is None:
        return CPU
    for key, machine in PRESETS.items():
        if re.search(rf"{key}(?!\d)", gpu.lower()):  # "RTX A1000" is no A100
            return machine
    return replace(PRESETS["a100"], name=f"A100, since {gpu} is not known")
