"""The task options that are not in MoEConfig, and the options of signals."""

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
SIGNAL_NAMES = f"give names of signals ({', '.join(SIGNALS)}), separated by commas, or none"
ZERO_STAGE: Rule = (
    lambda v: v in (0, 1, 2),
    "give 0 (nothing is partitioned), 1 (optimizer state) or 2 (also gradients)",
)


@dataclass(frozen=True)
class TaskConfig:
    """The task options that are not in MoEConfig; every task of the package has them."""

    # fmt: off
    # plugin/training/micro_batches.py checks this value against the number of ranks.
    moe_micro_batches: int = parallelism(
        0, unit="micro-batches", rule=whole(0, unit="micro-batches"),
        help="number N of micro-batches of an update over all ranks, so that an update has the same batch "
        "on any number of ranks W; it sets --update-freq to N / W, rounded up, and missing micro-batches "
        "are empty; 0: W times --update-freq",
    )
    # parallel/groups.py checks this value against the number of ranks.
    moe_expert_parallel_size: int = parallelism(
        0, unit="ranks",
        help="size of an expert-parallel (EP) group, whose ranks hold one set of experts and exchange "
        "tokens; it must divide the number of ranks, and divide or be a multiple of every layer's experts; "
        "0 uses the greatest common divisor in training and 1 (all experts on every rank) in inference",
    )
    moe_local_size: int = communication(
        0, unit="ranks", rule=(AT_LEAST_0[0], "give the ranks per node, or 0 for the launcher's value"),
        help="ranks per node, for --moe-a2a-algorithm and --moe-collective-plans; 0 uses the value of "
        "torchrun, OpenMPI or Slurm",
    )
    moe_use_2dh: bool = option(
        False, "the same as --moe-a2a-algorithm 2dh", theme="Older names", of="task",
        same_as=("a2a_algorithm", "2dh"),
    )
    moe_machine_file: str = communication(
        "",
        help="hardware profile, such as `fairseq-tutel plan --output` writes, for --moe-a2a-algorithm auto "
        "and --moe-adaptive auto; empty: typical values of the device",
    )
    moe_collective_plans: str = communication(
        "",
        help="FILE.json with a collective plan, or a folder of such files (`fairseq-tutel "
        "plans` and `schedule` write plans), for gradients, ZeRO, gathered experts and "
        "--moe-a2a-algorithm plan:NAME; other collectives run in torch; empty: no plan",
    )
    moe_adaptive_window: int = parallelism(
        128, unit="slots per expert", rule=whole(1, unit="slots"),
        help="--moe-adaptive auto chooses separately for each range of capacities; each range has at least "
        "this width, and at least a quarter of its lower end",
    )
    moe_checkpoint: str = checkpoints(
        "full", choices=("full", "sharded"),
        help="full: rank 0 gathers all experts into one file; sharded: every rank writes its experts into "
        "the folder experts of --save-dir, and the checkpoint refers to them; every run reads both",
    )
    moe_save_async: bool = checkpoints(
        False,
        help="write sharded checkpoints in threads while training continues; experts, optimizer state and "
        "rank 0's other parameters are copied to host memory first",
    )
    moe_zero_stage: int = memory(
        0, rule=ZERO_STAGE,
        help="partitioning over the ranks that hold the same parameters (ZeRO): 0, none; 1, optimizer "
        "state and fp32 master weights; 2, also gradients, which are reduced during the backward pass; "
        "experts are partitioned over their EP replicas, other parameters over all ranks; the result is "
        "the same",
    )
    moe_offload_optimizer: bool = memory(
        False,
        help="keep the optimizer state and fp32 master weights in host memory, and run the update on the "
        "CPU; the result is the same",
    )
    moe_comm_timeout: int = communication(
        1800, unit="seconds", rule=whole(0, 1_000_000),
        help="how long a collective waits for another rank before the job ends with an error that names "
        "that rank; 0 uses torch's limits",
    )
    record_a2a_perf_stats: bool = logging(
        False, unit="milliseconds",
        help="log the all-to-all time of an update as all_to_all_cpu_time_ms and, on a GPU, "
        "all_to_all_cuda_time_ms; synchronizes with the GPU once per micro-batch",
    )
    # fmt: on


@dataclass(frozen=True)
class PreemptionConfig:
    """Options that set how a signal, such as SIGTERM before a preemption, ends a training run."""

    # fmt: off
    moe_preemption_signals: str = checkpoints(
        "SIGTERM,SIGUSR1", rule=(lambda v: _signals_of(v) is not None, SIGNAL_NAMES),
        help="signals, separated by commas, after which all ranks finish the current update, save "
        "checkpoint_last.pt and end with exit code 75; none: signals end a process at once",
    )
    moe_preemption_seconds: float = checkpoints(
        25.0, unit="seconds", rule=POSITIVE,
        help="time that a rank has to save and end after a signal; then it ends at once. A validation ends "
        "after half of this time. It should be shorter than the time that the launcher and scheduler wait",
    )
    # fmt: on

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the signals; empty for none."""
        return _signals_of(self.moe_preemption_signals) or ()


def _signals_of(text: str) -> tuple[str, ...] | None:
    """Parse a list of signal names; return None if a name is unknown."""
    names = () if text.strip() == "none" else tuple(dict.fromkeys(map(str.strip, text.split(","))))
    return names if set(names) <= set(SIGNALS) else None
