"""Runs fairseq-train (with --config-name, fairseq-hydra-train) on several ranks, with the plugin loaded.

Usage: `torchrun --nproc_per_node N -m fairseq_tutel.train <arguments of fairseq-train>`. Each process gets
its rank from torchrun's environment. Collectives use gloo on CPU and NCCL on GPU. Without torchrun, fairseq
starts one process per visible GPU, or trains in one process on a CPU.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from operator import methodcaller
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    """Run fairseq-train or fairseq-hydra-train with the plugin loaded."""
    run_command("hydra_train" if _has("--config-name") or _has("-cn") else "train")


def run_command(name: str, call: Callable[[Any], object] = methodcaller("cli_main")) -> None:
    """Run a command of `fairseq_cli` with the plugin loaded."""
    if name != "hydra_train" and not _has("--user-dir"):
        sys.argv += ["--user-dir", os.path.dirname(os.path.abspath(__file__))]
    # Import the command before the plugin, because the first import sets the log's format.
    module = importlib.import_module(f"fairseq_cli.{name}")

    logging.getLogger("hydra").setLevel(logging.INFO)  # wav2vec2 sets the default level to DEBUG.

    from fairseq_tutel.plugin import register

    # Register the plugin now: hydra imports it too late, and fairseq imports --user-dir only once.
    register()
    call(module)


def _has(flag: str) -> bool:
    return any(word == flag or word.startswith(flag + "=") for word in sys.argv)


if __name__ == "__main__":
    main()
