"""`torchrun --nproc_per_node N -m fairseq_tutel.train <arguments of fairseq-train>`.

fairseq-train, or with --config-name fairseq-hydra-train, with the plugin loaded and ranks read from
torchrun's environment, on CPU (gloo) and on GPU (NCCL). Without torchrun it trains on one process.
"""

import importlib
import os
import sys
from collections.abc import Callable
from operator import methodcaller
from typing import Any

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    """Train."""
    run_command("hydra_train" if _has("--config-name") or _has("-cn") else "train")


def run_command(name: str, call: Callable[[Any], object] = methodcaller("cli_main")) -> None:
    """Call a module of `fairseq_cli` with the plugin loaded; destroy the process group after success."""
    if name != "hydra_train" and not _has("--user-dir"):
        sys.argv += ["--user-dir", os.path.dirname(os.path.abspath(__file__))]
    # The first to be imported sets the format of the log.
    module = importlib.import_module(f"fairseq_cli.{name}")

    from fairseq_tutel.plugin import register

    # fairseq skips a --user-dir whose package is already imported, and hydra imports it too late.
    register()
    call(module)
    if dist.is_initialized():
        dist.destroy_process_group()


def _has(flag: str) -> bool:
    return any(word == flag or word.startswith(flag + "=") for word in sys.argv)


if __name__ == "__main__":
    main()
