"""The options of a run that are not options of its MoE layers: ranks, collectives, memory, checkpoints."""

from dataclasses import dataclass

from fairseq_tutel.moe.config import ALL_LOCAL, NOT_TUNED, ONE_RANK
from fairseq_tutel.moe.model_options import older
from fairseq_tutel.options.option import (
    AT_LEAST_0,
    checkpoints,
    communication,
    logging,
    memory,
    needs,
    parallelism,
    whole,
)


@dataclass(frozen=True)
class TaskConfig:
    """The options of a run in addition to the MoEConfig of its layers; every task has them."""

    # ranks/groups.py checks it against the number of ranks.
    moe_expert_parallel_size: int = parallelism(
        0,
        "size of an expert-parallel (EP) group, whose ranks hold one set of experts and exchange tokens; "
        "it must divide the number of ranks, and divide or be a multiple of every layer's experts; 0 uses "
        "the greatest common divisor in training and 1 (all experts on every rank) in inference",
        unit="ranks",
    )
    moe_local_size: int = communication(
        0,
        "ranks per node, for --moe-a2a-algorithm and --moe-collective-plans; 0 uses the value of torchrun, "
        "OpenMPI or Slurm",
        unit="ranks",
        rule=(AT_LEAST_0[0], "give the ranks per node, or 0 for the launcher's value"),
        no_effect=(
            needs(
                lambda f: f.plans or f.layer.a2a_algorithm != "linear" or f.layer.adaptive == "auto",
                "--moe-a2a-algorithm 2dh or auto, --moe-collective-plans or --moe-adaptive auto",
            ),
        ),
    )
    moe_use_2dh: bool = older("a2a_algorithm", "2dh", of="task")
    moe_machine_file: str = communication(
        "",
        "hardware profile written by `python -m fairseq_tutel tune`, for --moe-a2a-algorithm auto and "
        "--moe-adaptive auto; empty: typical values of the device",
        no_effect=(
            needs(
                lambda f: f.layer.a2a_algorithm == "auto" or f.tuned,
                "--moe-a2a-algorithm auto or --moe-adaptive auto",
            ),
        ),
    )
    moe_collective_plans: str = communication(
        "",
        "collective plans, a FILE.json or a folder of them (`python -m fairseq_tutel plans` and `schedule` "
        "write some), for gradients, ZeRO, gathered experts and --moe-a2a-algorithm plan:NAME; other "
        "collectives run in torch; empty: no plan",
        no_effect=(ONE_RANK,),
    )
    moe_adaptive_file: str = parallelism(
        "",
        "file in which --moe-adaptive auto keeps its measurements for the next run; empty: "
        "moe_adaptive.json in --save-dir",
        no_effect=(NOT_TUNED,),
    )
    moe_adaptive_window: int = parallelism(
        128,
        "--moe-adaptive auto chooses separately for each range of capacities; a range's width is at least "
        "this and at least a quarter of its start",
        unit="slots per expert",
        rule=whole(1, unit="slots"),
        no_effect=(NOT_TUNED,),
    )
    moe_checkpoint: str = checkpoints(
        "full",
        "full: rank 0 gathers all experts into one file; sharded: every rank writes its experts into the "
        "folder experts of --save-dir, and the checkpoint refers to them; every run reads both",
        choices=("full", "sharded"),
    )
    moe_zero_stage: int = memory(
        0,
        "what is partitioned over the ranks that hold the same parameters: 0 nothing, 1 the optimizer "
        "state and fp32 masters, 2 gradients too, which are reduced during the backward pass; experts "
        "over their EP replicas, everything else over all ranks; the result is the same",
        rule=(
            lambda v: v in (0, 1, 2),
            "give 0 (nothing is partitioned), 1 (optimizer state) or 2 (gradients too)",
        ),
        no_effect=(ONE_RANK,),
    )
    moe_offload_optimizer: bool = memory(
        False,
        "keep the optimizer state and fp32 masters in host memory and update there; the result is the same",
    )
    # ranks/guard.py checks the bounds before the other options are read.
    moe_comm_timeout: int = communication(
        1800,
        "how long a collective waits for another rank before the job ends with an error that names that "
        "rank; 0 uses torch's limits",
        unit="seconds",
        of_any_training=True,
    )
    record_a2a_perf_stats: bool = logging(
        False,
        "log the all-to-all time of an update as all_to_all_cpu_time_ms and, on a GPU, "
        "all_to_all_cuda_time_ms; synchronizes with the GPU once per micro-batch",
        unit="milliseconds",
        no_effect=(ALL_LOCAL,),
    )
