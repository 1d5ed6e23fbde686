"""The free memory of this process: on a GPU, or on the host."""

from pathlib import Path

import torch

from fairseq_tutel.parallel import host_memory, world
from fairseq_tutel.parallel.rendezvous import ranks_per_node


def free_bytes(device: torch.device) -> int:
    """Return the free memory for this rank: of its GPU, or its share of the host memory of the node."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_free_bytes() // (ranks_per_node() or world.size())


def host_free_bytes(root: Path = Path("/")) -> int:
    """Return the free host memory; see `host_memory.available`.

    Raises:
        ValueError: the system has no MemAvailable.
    """
    available = host_memory.available(root)
    if available is None:
        raise ValueError(
            "cache (--moe-expert-cache) is auto, but this system has no MemAvailable in /proc/meminfo; "
            "give a size, such as 2GiB."
        )
    return available
