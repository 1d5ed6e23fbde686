"""Machine: how fast a cluster's links, memory and arithmetic are, measured, given or of a known GPU."""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fairseq_tutel.files.small import json_of

_FLAGS = {"inter_shared", "reduce_scatter_as_all_reduce"}


@dataclass(frozen=True)
class Link:
    """What a rank's messages take: alpha_s each, and their bytes / bytes_per_s together.

    Attributes:
        alpha_s: seconds for a message, whatever its size.
        bytes_per_s: in one direction.
    """

    alpha_s: float
    bytes_per_s: float

    def seconds(self, messages: float, num_bytes: float) -> float:
        """Return the time of that many messages with that many bytes together."""
        return messages * self.alpha_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank's share of a cluster.

    Attributes:
        name: for tables.
        intra: from a rank to the others of its node.
        inter: from a rank to other nodes, or from a node if `inter_shared`.
        memory_bytes_per_s: reading and writing together.
        flops_per_s: of the experts, as achieved and not as on a datasheet.
        gate_flops_per_s: of the gate, which runs in fp32.
        memory_bytes: of a rank; what does not fit is ranked last.
        launch_s: of a collective, before its first message.
        inter_shared: the ranks of a node share one link to the others, instead of one each.
        reduce_scatter_as_all_reduce: as gloo does it, with twice the steps and bytes.
    """

    name: str
    intra: Link
    inter: Link
    memory_bytes_per_s: float
    flops_per_s: float
    gate_flops_per_s: float
    memory_bytes: float
    launch_s: float = 0.0
    inter_shared: bool = False
    reduce_scatter_as_all_reduce: bool = False

    def to_json(self, path: Path) -> None:
        """Write the machine to a file that `from_json` and `plan --machine` read."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: Path) -> "Machine":
        """Read a machine.

        Raises:
            ValueError: the file is missing, no JSON, or a key of it is missing, unknown or of no use.
        """
        fix = "give a file of `tune --measure --json`"
        try:
            values = json_of(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} can not be read as a machine ({error}); {fix}.") from error
        known = {field.name for field in fields(cls)}
        optional = {"launch_s", *_FLAGS}
        if not isinstance(values, dict) or not known - optional <= set(values) <= known:
            found = set(values) if isinstance(values, dict) else set()
            wrong = sorted((known - optional - found) | (found - known))
            raise ValueError(f"{path} is no machine: {', '.join(wrong)} missing or unknown; {fix}.")
        for key in ("intra", "inter"):
            values[key] = _link(path, key, values[key])
        for key in known - optional - {"name", "intra", "inter"}:
            _refuse_unless_positive(path, key, values[key])
        if "launch_s" in values:
            _refuse_unless_seconds(path, "launch_s", values["launch_s"])
        for key in _FLAGS & set(values):
            if not isinstance(values[key], bool):
                raise ValueError(f"{path} has {key} {values[key]!r}; give true or false.")
        return cls(**values)


def _link(path: Path, key: str, value: Any) -> Link:
    if not isinstance(value, dict) or set(value) != {"alpha_s", "bytes_per_s"}:
        raise ValueError(f"{path} has {key} {value!r}; it needs alpha_s and bytes_per_s.")
    _refuse_unless_positive(path, f"{key}.bytes_per_s", value["bytes_per_s"])
    _refuse_unless_seconds(path, f"{key}.alpha_s", value["alpha_s"])
    return Link(**value)


def _refuse_unless_seconds(path: Path, key: str, value: Any) -> None:
    if not _is_number(value) or not value >= 0:
        raise ValueError(f"{path} has {key} {value!r}; give seconds, from 0.")


def _refuse_unless_positive(path: Path, key: str, value: Any) -> None:
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{path} has {key} {value!r}; give a number above 0.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# What of a datasheet's number is reached. Each source is a measurement; docs/scaling.md lists them.
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
# Of a message among many others in flight, not a latency. No source gives it: it is set so that at
# 32 MiB a rank 2DH overtakes linear between 128 and 256 A100s, where Tutel's maintainer puts it
# ("at least over 256", microsoft/Tutel issue 214).
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
    # One of the two dies (GCD) of a module, of which the system sees 16 a node. xGMI is no switch: seven
    # links of 50 GB/s, over which an even all-to-all of 16 can at best bring 15 * 75 / 16 GB/s to each
    # (linear program over the links). 16 GB/s of InfiniBand a die, as in the ForestColl paper.
    "mi250": _preset(
        "MI250 (one die)", intra_gb_s=15 * 75 / 16, inter_gb_s=16, memory_gb_s=3276.8 / 2,
        tflops=362.1 / 2, fp32_tflops=45.3 / 2, memory_gb=64,
    ),
}  # fmt: skip

# A rank on a CPU, by orders of magnitude: a loopback, 10 Gb/s Ethernet for a node, a core's arithmetic.
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
    """Return what is known of a GPU by its name, the A100's numbers for one not known; None: a CPU's."""
    if gpu is None:
        return CPU
    for key, machine in PRESETS.items():
        if re.search(rf"{key}(?!\d)", gpu.lower()):  # an RTX A1000 is no A100
            return machine
    return replace(PRESETS["a100"], name=f"A100, since {gpu} is not known")
