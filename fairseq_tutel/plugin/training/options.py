"""Defines the task options that are not in MoEConfig, and the options for signals that end a run."""

from dataclasses import dataclass
from functools import partial

from fairseq_tutel.option import (
    AT_LEAST_0,
    POSITIVE,
    Rule,
    communication,
    logging,
    memory,
    option,
    parallelism,
    whole,
)

checkpoints = partial(option, theme="Checkpoints", of="task")
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGQUIT")
SIGNAL_NAMES = f"give some of {', '.join(SIGNALS)}, separated by commas, or none"
ZERO_STAGE: Rule = (
    lambda v: v in (0, 1, 2),
    "give 0 (nothing is partitioned), 1 (optimizer state) or 2 (also gradients)",
)


@dataclass(frozen=True)
class TaskConfig:
    """Options that this package adds to every task, except those in MoEConfig."""

    # fmt: off
    moe_micro_batches: int = parallelism(
        0, unit="micro-batches", rule=whole(0, unit="micro-batches"),
        help="number N of micro-batches of an update, summed over all W ranks, so that the batch of an "
        "update does not depend on W; --update-freq is set to N / W, rounded up; 0: --update-freq sets "
        "the number",
    )
    moe_expert_parallel_size: int = parallelism(
        0, unit="ranks",
        help="number of ranks in an expert-parallel (EP) group, which together hold all experts once and "
        "exchange tokens; it must divide the number of ranks; for every layer, it must also divide the "
        "number of experts or be a multiple of it; 0: in training, the greatest common divisor of these "
        "numbers; in inference, 1",
    )
    moe_local_size: int = communication(
        0, unit="ranks", rule=(AT_LEAST_0[0], "give the ranks per node, or 0 for the launcher's value"),
        help="ranks per node, for --moe-a2a-algorithm and --moe-collective-plans; 0: the value of "
        "torchrun, OpenMPI or Slurm",
    )
    moe_use_2dh: bool = option(
        False, "the same as `--moe-a2a-algorithm 2dh`", theme="Older names", of="task",
        same_as=("a2a_algorithm", "2dh"),
    )
    moe_machine_file: str = communication(
        "",
        help="file with a hardware profile (written by `fairseq-tutel plan --output`), from which "
        "--moe-a2a-algorithm auto and --moe-adaptive auto predict times; empty: a typical profile",
    )
    moe_collective_plans: str = communication(
        "",
        help="JSON file with a collective plan, or a folder of plans (written by `fairseq-tutel plans` or "
        "`schedule`), used for gradients, ZeRO, gathered experts and --moe-a2a-algorithm plan:NAME; "
        "empty: torch performs all collectives",
    )
    moe_adaptive_window: int = parallelism(
        128, unit="slots per expert", rule=whole(1, unit="slots"),
        help="--moe-adaptive auto chooses a strategy for each range of capacities; a range has this width, "
        "but at least a quarter of its smallest capacity",
    )
    moe_checkpoint: str = checkpoints(
        "full", choices=("full", "sharded"),
        help="full: rank 0 gathers all experts and writes one file; sharded: every rank writes its "
        "experts into the subfolder experts of --save-dir; every run can read both formats",
    )
    moe_save_async: bool = checkpoints(
        False,
        help="write sharded checkpoints in threads while training continues; before each save, experts, "
        "optimizer state and rank 0's other parameters are copied to host memory",
    )
    moe_zero_stage: int = memory(
        0, rule=ZERO_STAGE,
        help="ZeRO stage: 1 partitions optimizer state and fp32 master weights over the ranks that hold "
        "the same parameters; 2 also partitions gradients, and reduces them during the backward pass",
    )
    moe_offload_optimizer: bool = memory(
        False,
        help="keep optimizer state and fp32 master weights in host memory, and run the update on the CPU",
    )
    moe_train_only: str = option(
        "", theme="Training", of="task",
        help="parameters to train, separated by commas: experts, gates, dense (outside of MoE layers), "
        "encoder, decoder, embeddings, expert:3,7 (experts 3 and 7 of every layer), or patterns such as "
        "decoder.layers.0.*; other parameters are frozen, without gradient and optimizer state; empty: all",
    )
    moe_comm_timeout: int = communication(
        1800, unit="seconds", rule=whole(0, 1_000_000),
        help="maximum time that a collective waits for another rank; after this time, the job ends with an "
        "error that names this rank; 0: torch's time-outs",
    )
    record_a2a_perf_stats: bool = logging(
        False, unit="milliseconds",
        help="log the time that all-to-alls take in an update as all_to_all_cpu_time_ms and, on a GPU, "
        "all_to_all_cuda_time_ms, which needs one synchronization with the GPU per micro-batch",
    )
    # fmt: on


@dataclass(frozen=True)
class PreemptionConfig:
    """Options that set how a signal, such as SIGTERM before a preemption, ends a training run."""

    # fmt: off
    moe_preemption_signals: str = checkpoints(
        "SIGTERM,SIGUSR1", rule=(lambda v: _signals_of(v) is not None, SIGNAL_NAMES),
        help="when a rank receives one of these signals (separated by commas), all ranks finish the "
        "update, save checkpoint_last.pt and exit with code 75; none: a signal ends its process at once",
    )
    moe_preemption_seconds: float = checkpoints(
        25.0, unit="seconds", rule=POSITIVE,
        help="maximum time from a signal until a rank has saved and ended; the launcher must wait longer "
        "before it kills the rank",
    )
    # fmt: on

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the signals that end a run; the list may be empty."""
        return _signals_of(self.moe_preemption_signals) or ()


def _signals_of(text: str) -> tuple[str, ...] | None:
    """Parse a list of signal names; return None if a name is unknown."""
    names = () if text.strip() == "none" else tuple(dict.fromkeys(map(str.strip, text.split(","))))
    return names if set(names) <= set(SIGNALS) else None
