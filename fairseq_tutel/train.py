"""`torchrun --nproc_per_node N -m fairseq_tutel.train <arguments of fairseq-train>`.

fairseq-train, or with --config-name fairseq-hydra-train, with the plugin loaded and ranks read from
torchrun's environment, on CPU (gloo) and on GPU (NCCL). Without torchrun it trains on one process.
"""

import importlib
import os
import sys

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    """Train; the process group is destroyed when the training ended well."""
    hydra = _has("--config-name") or _has("-cn")
    if not hydra and not _has("--user-dir"):
        sys.argv += ["--user-dir", os.path.dirname(os.path.abspath(__file__))]
    # The first to be imported sets the format of the log.
    command = importlib.import_module("fairseq_cli." + ("hydra_train" if hydra else "train"))

    from fairseq_tutel.plugin import register

    # fairseq skips a --user-dir whose package is imported already, as this one is; and hydra would
    # import it only after the ranks were read.
    register()
    command.cli_main()
    if dist.is_initialized():
        dist.destroy_process_group()


def _has(flag: str) -> bool:
    return any(word == flag or word.startswith(flag + "=") for word in sys.argv)


if __name__ == "__main__":
    main()
