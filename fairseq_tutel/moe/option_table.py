"""All options of a MoE model, its task and its criterion. The options of its layers are in config.py."""

from dataclasses import dataclass
from typing import Any

from fairseq_tutel.files import shown
from fairseq_tutel.moe.config import ALL_LOCAL, LAYER, NOT_TUNED, ONE_RANK
from fairseq_tutel.option import (
    AT_LEAST_0,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    UNITS,
    Option,
    Rule,
    balance,
    because,
    bytes_of,
    capacity,
    checkpoints,
    communication,
    experts,
    logging,
    memory,
    needs,
    option,
    options_in,
    parallelism,
    routing,
    whole,
)

STORE_POLICIES = ("on-demand", "pregated", "prefetch-all")
STORE_TIERS = ("host", "disk")
EVICTIONS = ("lfu", "lru", "fifo")
STORE_PRODUCTS = ("quantized", "unpacked")
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGQUIT")
SIGNAL_NAMES = f"give names of signals ({', '.join(SIGNALS)}), separated by commas, or none"
# Dtypes of the experts in a sharded checkpoint, besides their own.
EXPERT_DTYPES = ("bf16", "int8", "int4")
AUTO = "auto"
CACHE_SIZES = (
    "give a number of experts, such as 64, a size with a unit, such as 512MiB "
    f"({', '.join(UNITS)}), or {AUTO}"
)
NO_STORE = needs(lambda f: f.store.moe_expert_store != "resident", "--moe-expert-store")
NOT_OPENED = because(lambda f: not f.opened, "the model is not opened for inference")
NO_CACHE = needs(lambda f: f.store.moe_expert_cache != "0", "--moe-expert-cache")
SIDE_FREQ: Rule = (whole(-1)[0], "give a whole number of layers, at least 0, or -1 for --moe-freq")
ZERO_STAGE: Rule = (
    lambda v: v in (0, 1, 2),
    "give 0 (nothing is partitioned), 1 (optimizer state) or 2 (also gradients)",
)
BOTH_SIDES = because(
    lambda f: -1 not in (f.sides.encoder_moe_freq, f.sides.decoder_moe_freq),
    "--encoder-moe-freq and --decoder-moe-freq are given",
)
NO_BALANCE_LOSS = because(
    lambda f: f.layer.balance_loss.strip() in ("", "none"), "--moe-balance-loss is none"
)
NOT_PREGATED = needs(lambda f: f.pregated, "--moe-pregate")
NO_FRACTION = needs(
    lambda f: f.layer.eval_capacity_token_fraction > 0, "--moe-eval-capacity-token-fraction above 0"
)
NO_CMR = needs(lambda f: f.layer.cmr, "--moe-cmr")
FRACTION: Rule = (lambda v: 0 <= v <= 1, "give a number from 0 to 1")
NO_NODES = needs(
    lambda f: f.plans or f.layer.a2a_algorithm != "linear" or f.layer.adaptive == "auto",
    "--moe-a2a-algorithm 2dh or auto, --moe-collective-plans or --moe-adaptive auto",
)
NOT_PREDICTED = needs(
    lambda f: f.layer.a2a_algorithm == "auto" or f.tuned, "--moe-a2a-algorithm auto or --moe-adaptive auto"
)


def older(name: str, value: Any, of: str = "model") -> Any:
    """Define the option of a deprecated flag, which sets a field of MoEConfig to a fixed value."""
    flag = f"--moe-{name.replace('_', '-')}"
    help = f"the same as {flag} {value}"
    return option(False, help, theme="Older names", of=of, same_as=(name, value))


def accepted(default: Any, reason: str, **parts: Any) -> Any:
    """Define an option that has no effect but is accepted, since older command lines may contain it."""
    help = f"accepted for older command lines: {reason}"
    return option(default, help, theme="Older names", of="model", **parts)


@dataclass(frozen=True)
class ModelConfig:
    """Model options that are not in MoEConfig: the layers that have experts, and deprecated names."""

    # fmt: off
    moe_freq: int = experts(
        2, unit="layers", rule=whole(0, unit="layers"), no_effect=(BOTH_SIDES,),
        help="layer i (from 0) is a MoE layer if (i + 1) % moe_freq == 0; 0: no MoE layer",
    )
    moe_expert_count: str = experts(
        "8",
        help='experts per MoE layer, over all ranks: one number, or one per MoE layer, such as "8,8,16" '
        "(encoder layers first)",
    )
    moe_expert_ffn_dim: int = experts(
        0, rule=(AT_LEAST_0[0], "give the experts' hidden dimension, or 0 for the layer's FFN dimension"),
        help="hidden dimension of an expert; 0 uses the FFN dimension of the layer",
    )
    moe_pregate: int = routing(
        0, unit="MoE layers", rule=whole(0, unit="MoE layers"),
        help="pre-gating: each MoE layer's gate reads the input of an earlier MoE layer of the stack, this "
        "many MoE layers before, so that experts can be fetched early; gates without such a layer read the "
        "input of their layer; 0: off",
    )
    moe_local_drop: float = routing(
        0.0, rule=PROBABILITY, no_effect=(ALL_LOCAL,),
        help="gating dropout: probability with which a MoE layer sends no row to other ranks in a training "
        "update; each rank then replaces the experts of other ranks by its own",
    )
    moe_eval_capacity_max_seqlen: bool = capacity(
        False, no_effect=(NO_FRACTION,),
        help="--moe-eval-capacity-token-fraction takes every sentence as long as --max-source-positions "
        "(encoder) or --max-target-positions (decoder), instead of the real tokens",
    )
    moe_top1_expert: bool = older("top_k", 1)
    moe_gating_use_fp32: bool = accepted(False, "the gate and its softmax are in fp32 by default")
    no_moe_gating_use_fp32: bool = routing(False, "compute the gate and its softmax in the model's dtype")
    moe_batch_prioritized_routing: bool = older("drop_policy", "bpr")
    moe_normalize_gate_prob_before_dropping: bool = older("normalize_gate", "before")
    use_moe_pad_mask: bool = accepted(False, "padding is never routed")
    num_workers_valid: int = accepted(
        -1, "validation uses --num-workers processes",
        no_effect=(because(lambda f: True, "validation uses --num-workers processes"),),
    )
    # fmt: on


@dataclass(frozen=True)
class SidesConfig:
    """The options that encoder-decoder models have in addition to ModelConfig."""

    # fmt: off
    encoder_moe_freq: int = experts(
        -1, unit="layers", rule=SIDE_FREQ,
        help="--moe-freq for the encoder; 0: no MoE layer in the encoder; -1: same as --moe-freq",
    )
    decoder_moe_freq: int = experts(
        -1, unit="layers", rule=SIDE_FREQ,
        help="--moe-freq for the decoder; 0: no MoE layer in the decoder; -1: same as --moe-freq",
    )
    moe_pregate_sides: str = routing(
        "both", choices=("both", "encoder", "decoder"), no_effect=(NOT_PREGATED,),
        help="the stacks whose gates --moe-pregate connects to earlier layers",
    )
    # fmt: on


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
        no_effect=(NO_NODES,),
        help="ranks per node, for --moe-a2a-algorithm and --moe-collective-plans; 0 uses the value of "
        "torchrun, OpenMPI or Slurm",
    )
    moe_use_2dh: bool = older("a2a_algorithm", "2dh", of="task")
    moe_machine_file: str = communication(
        "", no_effect=(NOT_PREDICTED,),
        help="hardware profile written by `fairseq-tutel tune`, for --moe-a2a-algorithm auto and "
        "--moe-adaptive auto; empty: typical values of the device",
    )
    moe_collective_plans: str = communication(
        "", no_effect=(ONE_RANK,),
        help="FILE.json with a collective plan, or a folder of such files (`fairseq-tutel "
        "plans` and `schedule` write plans), for gradients, ZeRO, gathered experts and "
        "--moe-a2a-algorithm plan:NAME; other collectives run in torch; empty: no plan",
    )
    moe_adaptive_file: str = parallelism(
        "", no_effect=(NOT_TUNED,),
        help="file in which --moe-adaptive auto keeps its measurements for the next run; empty: "
        "moe_adaptive.json in --save-dir",
    )
    moe_adaptive_window: int = parallelism(
        128, unit="slots per expert", rule=whole(1, unit="slots"), no_effect=(NOT_TUNED,),
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
        0, rule=ZERO_STAGE, no_effect=(ONE_RANK,),
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
    # parallel/guard.py checks the bounds before the other options are read.
    moe_comm_timeout: int = communication(
        1800, unit="seconds", of_any_training=True,
        help="how long a collective waits for another rank before the job ends with an error that names "
        "that rank; 0 uses torch's limits",
    )
    record_a2a_perf_stats: bool = logging(
        False, unit="milliseconds", no_effect=(ALL_LOCAL,),
        help="log the all-to-all time of an update as all_to_all_cpu_time_ms and, on a GPU, "
        "all_to_all_cuda_time_ms; synchronizes with the GPU once per micro-batch",
    )
    # fmt: on


@dataclass(frozen=True)
class PreemptionConfig:
    """Options that set how a signal, such as SIGTERM before a preemption, ends a training run."""

    # fmt: off
    moe_preemption_signals: str = checkpoints(
        "SIGTERM,SIGUSR1", rule=(lambda v: _signals_of(v) is not None, SIGNAL_NAMES), of_any_training=True,
        help="signals, separated by commas, after which all ranks finish the current update, save "
        "checkpoint_last.pt and end with exit code 75; none: signals end a process at once",
    )
    moe_preemption_seconds: float = checkpoints(
        25.0, unit="seconds", rule=POSITIVE, of_any_training=True,
        help="time that a rank has to save and end after a signal; then it ends at once. A validation ends "
        "after half of this time. It should be shorter than the time that the launcher and scheduler wait",
    )
    # fmt: on

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the signals; empty for none."""
        return _signals_of(self.moe_preemption_signals) or ()


@dataclass(frozen=True)
class StoreConfig:
    """Options that set where experts are stored during inference and when they are loaded."""

    # fmt: off
    moe_expert_store: str = memory(
        "resident", choices=("resident", *STORE_POLICIES),
        help="when experts are loaded into memory in inference (no effect in training): resident, all "
        "experts when the model is opened; on-demand, experts with tokens when their layer runs; pregated, "
        "experts with tokens while an earlier layer runs, for models with --moe-pregate; prefetch-all, all "
        "experts of the next layer; the result is the same",
    )
    moe_expert_tier: str = memory(
        "auto", choices=("auto", *STORE_TIERS), no_effect=(NO_STORE,),
        help="where --moe-expert-store loads experts from: host, host memory; disk, the files of a sharded "
        "checkpoint; auto, host on a GPU, otherwise disk",
    )
    moe_expert_cache: str = memory(
        "0", rule=(lambda v: v == AUTO or _limits_of(v) is not None, CACHE_SIZES), no_effect=(NO_STORE,),
        help="size of the cache that keeps used experts of all layers in memory: a number of experts, a "
        "size with a unit, such as 2GiB, or auto: half of the memory that is free at the first fetch (on a "
        "CPU the smaller of MemAvailable and what the cgroup limits leave, over the ranks of the node)",
    )
    moe_expert_cache_policy: str = memory(
        "lfu", choices=EVICTIONS,
        no_effect=(NO_STORE, NO_CACHE),
        help="which expert a full cache evicts: lfu, the least frequently used; lru, the least recently "
        "used; fifo, the first fetched",
    )
    moe_expert_compute: str = memory(
        "quantized", choices=STORE_PRODUCTS, no_effect=(NO_STORE,),
        help="how int8 and int4 experts of --moe-expert-store are multiplied on a CPU: quantized, as they "
        "are stored, with inputs and outputs rounded to bf16; unpacked, after conversion to the model's "
        "dtype, which is slower",
    )
    moe_inference_dtype: str = memory(
        "auto", choices=("auto", "bf16", "int8"), no_effect=(NOT_OPENED,),
        help="dtype of a model that is opened for inference (no effect in training): auto, the dtype that "
        "the command sets; bf16, which takes half of the memory of fp32; int8, bf16 with the linear layers "
        "of the decoder in int8, except for experts, which is faster for few sentences on a CPU",
    )
    moe_expert_prefetch: str = memory(
        "", no_effect=(NO_STORE, NO_CACHE),
        help="JSON file of `tokens --output-statistics`: when the model is opened, the store begins to "
        "fetch the experts with the most assignments in it, until the cache is full; empty: none",
    )
    moe_expert_prefetch_pairs: str = memory(
        "", no_effect=(NO_STORE, needs(lambda f: f.store.moe_expert_prefetch, "--moe-expert-prefetch")),
        help="language pairs in --moe-expert-prefetch whose assignments count, separated by commas, such "
        "as de-en; empty: the pair of the task if the file has it, otherwise all pairs",
    )
    # fmt: on


@dataclass(frozen=True)
class CriterionConfig:
    """Options that set how a criterion uses the balance losses. Options of the model choose the losses."""

    # fmt: off
    moe_gate_loss_wt: float = balance(
        0.01, of="criterion",
        rule=(NOT_NEGATIVE[0], "give a finite number, at least 0 (0 disables the balance loss)"),
        no_effect=(NO_BALANCE_LOSS,),
        help="weight of the balance loss per unit of sample size; 0 disables the balance loss",
    )
    moe_gate_loss_combine_method: str = balance(
        "average", of="criterion", choices=("average", "sum"), no_effect=(NO_BALANCE_LOSS,),
        help="how the balance losses of the layers are combined",
    )
    moe_gate_loss_transform: str = balance(
        "none", of="criterion", choices=("none", "neg_log"), no_effect=(NO_BALANCE_LOSS,),
        help="function applied to the combined balance loss: none, or neg_log for -log",
    )
    cmr_gate_loss_wt: float = balance(
        0.0, of="criterion", rule=NOT_NEGATIVE, no_effect=(NO_CMR,),
        help="weight of the budget loss of --moe-cmr per unit of sample size: the difference between "
        "--cmr-gate-loss-p and the mean of the gates over all tokens and layers; 0 disables it",
    )
    cmr_gate_loss_p: float = balance(
        1.0, of="criterion", rule=FRACTION, no_effect=(NO_CMR,),
        help="the mean of the gates of --moe-cmr that --cmr-gate-loss-wt trains towards: the share of the "
        "outputs that comes from experts",
    )
    moe_log_layers: bool = logging(
        False, of="criterion",
        help="log every MoE layer's metrics and every expert's load as scalars for TensorBoard and Weights "
        "& Biases",
    )
    # fmt: on


BY_OWNER = {
    "model": (*options_in(ModelConfig), *LAYER.values(), *options_in(SidesConfig)),
    "task": (
        *options_in(TaskConfig),
        *options_in(PreemptionConfig),
        *options_in(StoreConfig),
        *LAYER.values(),
    ),
    "criterion": options_in(CriterionConfig),
}

# Keys of removed options, and the reason. A checkpoint that holds them opens as if it did not.
RETIRED = {
    "moe_kernel_tuning_seconds": "tile sizes of kernels come from a table",
    "distill_top_k": "the teacher's whole distribution is used",
    "distill_logits": "the teacher is in memory",
    "cmcl_teach_router": "only ensembles learn by CMCL",
}


def options_of(owner: str) -> list[Option]:
    """Return all options of an owner ("model", "task" or "criterion"), in the order of definition."""
    return [item for item in BY_OWNER[owner] if item.of == owner]


def cache_limits(cache: int | str) -> tuple[int | None, int | None]:
    """Parse the size of an expert cache to (bytes, experts), one of which is None, or raise ValueError."""
    limits = _limits_of(str(cache))
    if limits is None:
        raise ValueError(f"cache (--moe-expert-cache) is {shown(cache)}; {CACHE_SIZES}.")
    return limits


def _signals_of(text: str) -> tuple[str, ...] | None:
    """Parse a list of signal names; return None if a name is unknown."""
    names = () if text.strip() == "none" else tuple(dict.fromkeys(map(str.strip, text.split(","))))
    return names if set(names) <= set(SIGNALS) else None


def _limits_of(text: str) -> tuple[int | None, int | None] | None:
    if text.strip().isdecimal() and len(text) <= 18:  # Python does not convert very long numbers
        return None, int(text)
    size = bytes_of(text)
    return None if size is None else (size, None)
