"""Hardware profiles: the speed of links, memory and arithmetic, read from a file or typical of a GPU."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_tutel.files import json_of


@dataclass(frozen=True)
class Link:
    """The speed of a rank's link: the latency of a message and the bytes per second."""

    alpha_s: float  # The latency of each message.
    bytes_per_s: float  # The bandwidth in one direction.

    def seconds(self, messages: float, num_bytes: float) -> float:
        """Return the seconds to send a number of messages that have `num_bytes` bytes in total."""
        return messages * self.alpha_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware profile of one rank: the speed of links, memory and arithmetic."""

    name: str
    intra: Link  # The link from a rank to other ranks of its node.
    inter: Link  # A rank's link to other nodes, while all ranks of the node send.
    memory_bytes_per_s: float  # The bandwidth of reads plus writes.
    flops_per_s: float  # The FLOP/s that experts achieve.
    gate_flops_per_s: float  # The FLOP/s that the gate achieves in fp32.
    memory_bytes: float
    launch_s: float = 0.0  # The time before a collective's first message.

    @classmethod
    def from_json(cls, path: Path) -> "Machine":
        """Read a hardware profile from a JSON file. Raise ValueError if the file has no valid profile.

        An output file of the tool `plan` is also valid; it has the profile under the key `machine`.
        """
        try:
            values = json_of(path)
            values = values.get("machine", values)
            links = [Link(**values[name]) for name in ("intra", "inter")]
            machine = cls(**values | dict(zip(("intra", "inter"), links, strict=True)))
            speeds = [link.bytes_per_s for link in links]
            speeds += [machine.memory_bytes_per_s, machine.flops_per_s, machine.gate_flops_per_s]
            latencies = [machine.launch_s, *(link.alpha_s for link in links)]
            if min(*speeds, machine.memory_bytes) <= 0 or min(latencies) < 0:
                raise ValueError("a speed is not above 0, or a latency is negative")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} cannot be read as a hardware profile ({error!r}); give a file that "
                "`plan --output` wrote."
            ) from error
        return machine


# Fractions of datasheet values that are achieved, and latencies. docs/scaling.md lists the sources.
_NVLINK, _INFINIBAND = 370 / 450, 47 / 50  # The fractions of the bandwidth.
_EXPERTS = 413 / 989  # The fraction of peak FLOP/s that a Triton MoE layer reaches in bf16 on an H100.
_LAUNCH_S = 10e-6  # The launch time of a collective.
_INTRA_ALPHA_S = 0.6e-6  # The latency that NCCL's model assumes for NVLink (LL protocol).
# With this latency between nodes, the cost model predicts that 2DH beats linear from 256 A100s on.
_INTER_ALPHA_S = 1.0e-6


def _preset(
    name: str,
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


# Datasheet numbers of one GPU (or one of an MI250's two dies), with link bandwidth in one direction.
PRESETS = {
    "a100": _preset("A100", 300, 25, 2039, 312, 19.5, 80),  # An NDm A100 v4 has one HDR adapter per GPU.
    "h100": _preset("H100", 450, 50, 3350, 989, 67, 80),  # A DGX H100 has one NDR adapter per GPU.
    "h200": _preset("H200", 450, 50, 4800, 989, 67, 141),
    "mi250": _preset("MI250 (one die)", 15 * 75 / 16, 16, 3276.8 / 2, 362.1 / 2, 45.3 / 2, 64),
}

# Rough numbers for a rank on one CPU core: loopback links, and 10 Gb/s Ethernet that four ranks share.
CPU = Machine(
    name="CPU",
    intra=Link(20e-6, 2e9),
    inter=Link(50e-6, 1.25e9 / 4),
    memory_bytes_per_s=4e9,
    flops_per_s=8e10,
    gate_flops_per_s=8e10,
    memory_bytes=8e9,
)


def typical(gpu: str | None) -> Machine:
    """Return the typical hardware profile of a GPU type, or of a CPU if `gpu` is None.

    An unknown type of GPU gets the profile of an A100.
    """
    if gpu is None:
        return CPU
    for key, machine in PRESETS.items():
        if re.search(rf"{key}(?!\d)", gpu.lower()):  # An "RTX A1000" is not an A100.
            return machine
    return replace(PRESETS["a100"], name=f"A100, because {gpu} is unknown")
