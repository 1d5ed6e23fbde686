"""How many ranks share a node, which GPU is whose and who keeps the store, as the launcher says it."""

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


def keeps_the_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the store by which ranks find each other is the launcher's, and not rank 0's."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def own_gpu(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process's GPU among those that it sees, which may be its own alone."""
    return int(environment.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
