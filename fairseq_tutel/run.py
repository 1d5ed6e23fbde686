"""Runs fairseq-generate, fairseq-interactive, fairseq-eval-lm or fairseq-validate on several ranks.

Usage: `torchrun --nproc_per_node N -m fairseq_tutel.run COMMAND <arguments of fairseq-COMMAND>`. The module
loads the plugin, and gets its rank from torchrun's environment. The sentences to process are distributed
over the ranks. With --moe-expert-parallel-size, experts are distributed over ranks, too.
"""

import io
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from fairseq_tutel.train import run_command

COMMANDS = ("generate", "interactive", "eval-lm", "validate")


@record
def main() -> None:
    """Run the fairseq command that the first argument names."""
    command = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        sys.exit(f"error: the command is {command!r}; give one of {', '.join(COMMANDS)}.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # Ranks share a pipe, so write only complete lines.
    if command == "generate":
        run_command(command, _generate)
    else:
        run_command(command.replace("-", "_"))


def _generate(module: Any) -> None:
    """Run fairseq-generate as its `cli_main` does, but initialize torch.distributed first."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed import utils as distributed_utils

    args = options.parse_args_and_arch(options.get_generation_parser())
    distributed_utils.call_main(convert_namespace_to_omegaconf(args), module.main)


if __name__ == "__main__":
    main()
