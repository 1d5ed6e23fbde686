"""How many ranks share a node, and which GPU is whose, as the launcher says it."""

import os
import re
from collections.abc import Mapping

import torch


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int:
    """Return L from torchrun, OpenMPI or Slurm, or 0 where none of them says it.

    Slurm's SLURM_NTASKS_PER_NODE may be "8" or "8(x4)"; nodes of different sizes ("8,4") give 0.
    """
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        found = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get(name, ""))
        if found:
            return int(found[1])
    return 0


def own_gpu(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process's GPU among those that it sees, which may be its own alone."""
    return int(environment.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
