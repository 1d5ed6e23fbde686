"""The table of all options: of a MoE layer, and of a model, a task and a criterion around its layers.

An option is one entry: a field of one of these dataclasses with all that options.py's `Option` names. Made
from it are flags and hydra keys (plugin/flags.py), refusals, the lines of what has no effect
(plugin/announce.py), what converters use (convert/dense.py), `python -m fairseq_tutel flags` and
docs/flags.md.

Options of a model say what is computed and are saved with it. A task's say how it is computed and may
change between two runs on one checkpoint; their result is the same.
"""

import math
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any, ClassVar

from fairseq_tutel.kernels.autotune import SECONDS
from fairseq_tutel.moe.checks import (
    BALANCE_LOSSES,
    CACHE_SIZES,
    is_cache_size,
    refuse_contradictions,
)
from fairseq_tutel.moe.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    CAPACITY,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Condition,
    Option,
    Rule,
    because,
    needs,
    one_of,
    option,
    options_in,
    refuse_bad_values,
    refuse_excluded,
    whole,
)
from fairseq_tutel.planning.strategy import ALGORITHMS, degree_of, is_algorithm

ACTIVATIONS = (
    "relu",
    "relu_squared",
    "gelu",
    "gelu_fast",
    "gelu_accurate",
    "tanh",
    "linear",
    "swish",
)
GATE_TYPES = ("linear", "cosine", "hash")
EXPERT_TYPES = ("ffn", "glu")
STORE_POLICIES = ("on-demand", "pregated", "prefetch-all")
STORE_TIERS = ("host", "disk")
EVICTIONS = ("lfu", "lru", "fifo")

# Rules of more than one place.
OVERLAP = whole(1, 32)
MILLION = 1_000_000
TEMPERATURE: Rule = (
    lambda v: 0.01 <= v < math.inf,
    "give at least 0.01, which is where the gate stops it",
)

# Where an option is idle; f: plugin/announce.Facts, f.layer: the MoEConfig of the first layer.
NO_CAPACITY = needs(
    lambda f: bool(
        f.layer.capacity_factor
        or f.layer.eval_capacity_factor
        or f.layer.eval_capacity_token_fraction > 0
    ),
    "a capacity, such as --moe-capacity-factor 1",
)
NOT_COSINE = needs(lambda f: "cosine" in f.layer.gate_types, "--moe-gate-type cosine")
ONE_CHOICE = needs(lambda f: f.layer.top_k > 1, "--moe-top-k 2 or more")
NO_BALANCE_LOSS = because(
    lambda f: f.layer.balance_loss.strip() in ("", "none"), "--moe-balance-loss is none"
)
ONE_RANK = because(lambda f: f.ranks == 1, "there is one rank")
ALL_HERE = because(lambda f: f.expert_parallel_size == 1, "every rank has all experts")
NO_ROWS = because(lambda f: f.adaptive_r == 0 and not f.tuned, "with adaptive_r 0 no row travels")
NOT_TUNED = needs(lambda f: f.tuned, "--moe-adaptive auto")
NO_STORE = needs(lambda f: f.store.moe_expert_store != "resident", "--moe-expert-store")
TUNED = "the tuner chooses; it is what its gain is told against"

# Where an option is refused; f: the MoEConfig.
EXPERTS_CHOOSE = Condition(
    lambda f: f.choice == "experts",
    "experts choose their tokens (--moe-choice experts), which leaves it nothing to do",
)
HASHED = Condition(
    lambda f: "hash" in f.gate_types,
    "gate_type (--moe-gate-type) is {f.gate_type!r}, and a hash alone says what a token's experts are and "
    "that each weighs 1 / top_k",
)

# A theme of docs/flags.md, and whose options it has where an entry does not say otherwise.
routing = partial(option, theme="Routing", of="model")
capacity = partial(option, theme="Capacity", of="model")
balance = partial(option, theme="Balance", of="model")
experts = partial(option, theme="Experts", of="model")
communication = partial(option, theme="Communication", of="task")
parallelism = partial(option, theme="Parallelism", of="task")
memory = partial(option, theme="Memory", of="task")
checkpoints = partial(option, theme="Checkpoints", of="task")
kernels = partial(option, theme="Kernels", of="task")
logging = partial(option, theme="Logging", of="task")


def older(name: str, value: Any, of: str = "model") -> Any:
    """An older name of a field of MoEConfig at this value."""
    flag = f"--moe-{name.replace('_', '-')}"
    help = f"the same as {flag} {value}"
    return option(False, help, theme="Older names", of=of, same_as=(name, value))


def accepted(default: Any, reason: str, **parts: Any) -> Any:
    """An option of older command lines that nothing depends on."""
    help = f"accepted for older command lines: {reason}"
    return option(default, help, theme="Older names", of="model", **parts)


@dataclass(frozen=True)
class MoEConfig:
    """Configuration of one MoE layer; a bad value raises ValueError naming option, value and fix."""

    prefix: ClassVar[str] = "moe_"  # of the keys
    # Those without `of` come from the stock model, or from ModelConfig below.
    model_dim: int = option(
        MISSING, rule=AT_LEAST_1, flag="--decoder-embed-dim / --encoder-embed-dim"
    )
    hidden_dim: int = option(MISSING, rule=AT_LEAST_1, flag="--moe-expert-ffn-dim")
    num_experts: int = option(MISSING, rule=AT_LEAST_1, flag="--moe-expert-count")
    top_k: int = routing(2, "experts per token, from 1 to the number of experts", rule=AT_LEAST_1)
    capacity_factor: float = capacity(
        0.0,
        "training capacity as a multiple of an even share of the micro-batch: f > 0 gives every expert "
        "top_k * ceil(f * tokens / experts) places, 0 drops nothing, f < 0 takes as many places as "
        "needed but at most those of |f|",
        rule=CAPACITY,
    )
    eval_capacity_factor: float = capacity(
        0.0,
        "capacity factor in evaluation and generation, same rule; 0 drops nothing, so that an output "
        "never depends on what else is in the batch (under --moe-choice experts 0 is as in training)",
        rule=CAPACITY,
    )
    eval_capacity_token_fraction: float = capacity(
        0.0,
        "places per expert in evaluation as a fraction of the micro-batch's tokens, rounded up; below 0: "
        "capacity as in training; 0: by --moe-eval-capacity-factor",
        rule=CAPACITY,
    )
    min_capacity: int = capacity(
        0,
        "places per expert at least, where the capacity is limited",
        unit="tokens",
        rule=whole(0, MILLION),
        idle=(NO_CAPACITY,),
    )
    capacity_multiple: int = capacity(
        1,
        "a limited capacity is rounded up to a multiple of this",
        unit="tokens",
        rule=whole(1, MILLION),
        idle=(NO_CAPACITY,),
    )
    drop_policy: str = capacity(
        "position",
        "who keeps a place when an expert is full: position the earliest tokens, bpr (batch-prioritised "
        "routing) those with the largest probability, rts (random token selection) random ones, in "
        "evaluation the earliest, probability the copies with the largest probability, whatever choice",
        choices=("position", "bpr", "rts", "probability"),
        idle=(NO_CAPACITY,),
        excluded=(EXPERTS_CHOOSE,),
    )
    choice: str = routing(
        "tokens",
        "who chooses: tokens their experts, or experts their tokens (expert choice: every expert takes "
        "the top_k * ceil(f * tokens / experts) tokens that score highest, f = 1 where the capacity "
        "factor is 0; a token's experts then depend on later tokens, so it is not for causal models)",
        choices=("tokens", "experts"),
        common=lambda v: v == "tokens",
        excluded=(HASHED,),
    )
    gate_type: str = routing(
        "linear",
        "how tokens are scored: linear, cosine (between a projection and one direction per expert), hash "
        "(of the token's id, without parameters), or package.module.Class of your own; several, "
        "separated by commas, are gates on the same experts",
        common=lambda v: v == "linear",
    )
    gate_index: int = routing(0, "which of several gates is used, from 0", rule=AT_LEAST_0)
    gate_projection_dim: int = routing(
        256, "dimension of the cosine gate's projection", rule=AT_LEAST_1, idle=(NOT_COSINE,)
    )
    gate_temperature: float = routing(
        0.5,
        "temperature that the cosine gate begins with and learns from; at least 0.01",
        rule=TEMPERATURE,
        idle=(NOT_COSINE,),
    )
    score_function: str = routing(
        "softmax",
        "what makes scores of logits: softmax over the experts, or sigmoid of each",
        choices=("softmax", "sigmoid"),
        common=lambda v: v == "softmax",
        excluded=(HASHED,),
    )
    normalize_gate: str = routing(
        "before",
        "divide the weights of a token's experts by their sum, where top_k > 1: before dropping, after "
        "it (over those that are left), or none",
        choices=("before", "after", "none"),
        idle=(ONE_CHOICE,),
    )
    routed_scaling_factor: float = routing(
        1.0,
        "what all weights are multiplied with in the end",
        rule=POSITIVE,
        common=lambda v: 0 < v <= 1,
    )
    prescore: bool = routing(
        False,
        "weights multiply what experts read, not what they give",
        common=lambda v: not v,
    )
    expert_groups: int = routing(
        1,
        "groups of neighbouring experts; a token chooses its groups first (by the sum of the best "
        "top_k / groups-per-token scores in each), then experts in them alone",
        rule=AT_LEAST_1,
        common=lambda v: v == 1,
        excluded=(EXPERTS_CHOOSE, HASHED),
    )
    groups_per_token: int = routing(
        1,
        "groups of experts that a token may choose from",
        rule=AT_LEAST_1,
        idle=(
            needs(
                lambda f: f.layer.groups_per_token < f.layer.expert_groups,
                "more --moe-expert-groups than that",
            ),
        ),
    )
    second_expert_policy: str = routing(
        "all",
        "every choice after the first: all by its score, sampling from the other experts' scores in "
        "training, random takes it in training with a probability of top_k times its weight",
        choices=("all", "sampling", "random"),
        idle=(ONE_CHOICE,),
        excluded=(EXPERTS_CHOOSE, HASHED),
    )
    rsample: bool = routing(
        False,
        "in training choose experts by sampling (Gumbel noise on the choice); weights stay without noise",
        excluded=(EXPERTS_CHOOSE, HASHED),
    )
    sinkhorn: bool = routing(
        False,
        "in training choose experts by Sinkhorn's balanced scores, which spread a micro-batch's tokens "
        "evenly; weights stay the scores",
        excluded=(EXPERTS_CHOOSE, HASHED),
    )
    gate_noise: float = routing(
        0.0,
        "standard deviation, times the number of experts, of gaussian noise on the logits in training",
        rule=NOT_NEGATIVE,
        excluded=(HASHED,),
    )
    input_jitter: float = routing(
        0.0,
        "in training the gate sees every element times a number uniform in 1 - j to 1 + j",
        rule=PROBABILITY,
        excluded=(HASHED,),
    )
    input_dropout: float = routing(
        0.0,
        "dropout of what the gate sees, a probability",
        rule=PROBABILITY,
        excluded=(HASHED,),
    )
    gate_fp32: bool = option(True)
    balance_loss: str = balance(
        "gshard:1",
        "balance losses of a layer with their relative weights, name:weight separated by commas, or none; "
        + ", ".join(f"{name} ({what})" for name, what in BALANCE_LOSSES.items()),
    )
    balance_bias: bool = balance(
        False,
        "balance by a bias on the choice, not on the weights, that rises for idle experts and falls "
        "for busy ones after every update",
        common=lambda v: not v,
        excluded=(EXPERTS_CHOOSE, HASHED),
    )
    bias_update_rate: float = balance(
        0.001,
        "step of the balance bias per update, in units of scores; 0 freezes it",
        rule=NOT_NEGATIVE,
        idle=(needs(lambda f: f.layer.balance_bias, "--moe-balance-bias"),),
    )
    expert_type: str = experts(
        "ffn",
        "ffn: two linear maps with an activation between; glu: SwiGLU, silu(x W1) * (x W3) then W2; or "
        "package.module.Class of your own, a torch module that is one expert",
        rule=one_of(EXPERT_TYPES, or_class=True),
        common=lambda v: v == "ffn",
    )
    shared_experts: int = experts(
        0,
        "experts that every token goes through beside its own, added to their output",
        rule=AT_LEAST_0,
        common=lambda v: v == 0,
    )
    residual: bool = experts(
        False,
        "residual MoE: beside the experts a dense feed-forward network of their size, the two outputs "
        "mixed by a learned softmax",
        common=lambda v: not v,
    )
    expert_grad_norm: str = experts(
        "world_size",
        "what the experts' summed gradients are divided by on several ranks: world_size, as all others, "
        "or sqrt_world_size",
        flag="--moe-normalize-expert-grad",
        choices=("world_size", "sqrt_world_size"),
        idle=(ONE_RANK,),
    )
    activation: str = option("relu", rule=one_of(ACTIVATIONS), flag="--activation-fn")
    expert_bias: bool = option(True)
    activation_dropout: float = option(0.0, rule=PROBABILITY, flag="--activation-dropout")
    hidden_layer_norm: bool = option(False)
    # Of the experts' weights, normal, biases zero; 0: as nn.Linear draws them.
    init_std: float = option(0.0, rule=NOT_NEGATIVE)
    backend: str = kernels(
        "auto",
        "kernels of routing, dispatch, experts and combine: auto takes triton on a GPU where it is "
        "installed, else the plain torch reference",
        choices=("auto", "reference", "triton"),
    )
    recompute_experts: bool = memory(
        False,
        "keep no hidden layer of the experts for backward, which makes it again: less memory for more "
        "work; the result is the same",
    )
    kernel_tuning_seconds: float = kernels(
        SECONDS,
        "how long a process may measure in all which configuration of a kernel is fastest on its GPU, "
        "compilation included; what it finds is kept for later processes; 0 takes the defaults; the "
        "result is the same to rounding; the environment variable FAIRSEQ_TUTEL_TUNE_SECONDS goes before",
        unit="seconds",
        rule=NOT_NEGATIVE,
        idle=(because(lambda f: not f.gpu, "kernels are timed on a GPU alone"),),
    )
    exchange: str = communication(
        "ragged",
        "what crosses ranks: ragged sends only the kept rows, padded sends equal buffers whose size the "
        "ranks agree on; the result is the same",
        choices=("ragged", "padded"),
        idle=(ALL_HERE, NO_ROWS),
    )
    a2a_algorithm: str = communication(
        "linear",
        "how rows cross ranks: linear, every rank sends to every other; 2dh, 2-D hierarchical, within the "
        "node first: fewer, larger messages, which pays on many nodes and needs experts over several "
        "whole ones; auto, what a model of the cluster expects to be faster; plan:NAME, the plan of that "
        "file of --moe-collective-plans; the result is the same",
        rule=(
            lambda v: v == "auto" or is_algorithm(v),
            f"choose one of {', '.join(ALGORITHMS)}, auto, or plan:NAME",
        ),
        idle=(
            ALL_HERE,
            because(
                lambda f: f.layer.a2a_algorithm == "2dh" and not f.over_nodes,
                "rows go among {f.expert_parallel_size} ranks, which are not several whole nodes of "
                "{f.ranks_per_node}",
            ),
            NO_ROWS,
        ),
    )
    a2a_dtype: str = communication(
        "same",
        "dtype of rows while they cross ranks: same, bf16, or fp8 with a scale for every row; the "
        "narrow ones lose digits",
        choices=("same", "bf16", "fp8"),
        idle=(
            ALL_HERE,
            NO_ROWS,
            because(
                lambda f: f.layer.a2a_dtype == "bf16" and f.half,
                "rows are in half precision as they are",
            ),
        ),
    )
    a2a_ffn_overlap_degree: int = communication(
        1,
        "chunks of rows that cross ranks while the experts work on others; the result is the same",
        rule=OVERLAP,
        idle=(ALL_HERE, NO_ROWS),
    )
    parallel_type: str = parallelism(
        "adaptive:1",
        "how ranks share the experts: adaptive:r with r as in --moe-adaptive-r; data, the same as "
        "adaptive:1; model, r as large as it can be; auto, r by measuring; the result is the same",
        rule=(
            lambda v: (r := degree_of(v, slices=1)) is not None and r >= 0,
            "give adaptive:r with r a whole number, data, model or auto",
        ),
        idle=(
            ALL_HERE,
            because(
                lambda f: f.layer.parallel_type != "auto" and f.layer.adaptive_r >= 0,
                "--moe-adaptive-r is given",
            ),
            because(lambda f: f.layer.parallel_type != "auto" and f.tuned, TUNED),
        ),
    )
    adaptive_r: int = parallelism(
        -1,
        "ranks that get a row, each with that part of its expert's hidden dimension, where ranks are more "
        "than experts: 0 (gather all experts everywhere, send no row) or a divisor of the ranks per "
        "expert, more count as that; -1: by --moe-parallel-type; the result is the same",
        rule=whole(-1, MILLION),
        idle=(
            ALL_HERE,
            because(
                lambda f: f.layer.adaptive_r > f.slices,
                "an expert has {f.slices} ranks, and {f.slices} is taken",
            ),
            because(lambda f: f.tuned, TUNED),
        ),
    )
    adaptive: str = parallelism(
        "off",
        "auto: choose --moe-adaptive-r, --moe-a2a-ffn-overlap-degree and --moe-a2a-algorithm by measuring "
        "updates; off: as they are given",
        choices=("off", "auto"),
        idle=(ALL_HERE,),
    )

    def __post_init__(self) -> None:
        refuse_bad_values(self)
        for item in LAYER.values():
            value = getattr(self, item.name)
            if item.type in (int, float) and not isinstance(value, int | float):  # NumPy's
                object.__setattr__(self, item.name, item.type(value))
        holds, otherwise = one_of(GATE_TYPES, or_class=True)
        if not all(map(holds, self.gate_types)):
            raise ValueError(f"{label_of('gate_type')} is {self.gate_type!r}; {otherwise}.")
        refuse_contradictions(self)
        refuse_excluded(self)

    @property
    def gate_types(self) -> list[str]:
        """The gates by name, in the order of their index."""
        return [name.strip() for name in self.gate_type.split(",")]


@dataclass(frozen=True)
class ModelConfig:
    """What a model has beyond the MoEConfig of its layers: which layers have experts; older names."""

    moe_freq: int = experts(
        2,
        "layer i (from 0) is a MoE layer when (i + 1) % moe_freq == 0",
        unit="layers",
        rule=whole(0, unit="layers"),
        idle=(
            because(
                lambda f: -1 not in (f.sides.encoder_moe_freq, f.sides.decoder_moe_freq),
                "--encoder-moe-freq and --decoder-moe-freq are given",
            ),
        ),
    )
    moe_expert_count: str = experts(
        "8",
        'experts of a MoE layer, over all ranks: one number, or one per MoE layer, as "8,8,16" (encoder '
        "layers first)",
    )
    moe_expert_ffn_dim: int = experts(
        0,
        "hidden dimension of one expert; 0 takes the layer's own FFN dimension",
        rule=(AT_LEAST_0[0], "give the experts' hidden dimension, or 0 for the layer's own"),
    )
    moe_pregate: int = routing(
        0,
        "pre-gating: the gate of a MoE layer sees the input of the MoE layer this many before it in its "
        "stack, so that its experts are known ahead; the first so many see their own; 0: all see their own",
        unit="MoE layers",
        rule=whole(0, unit="MoE layers"),
        common=lambda v: v == 0,
    )
    moe_top1_expert: bool = older("top_k", 1)
    moe_gating_use_fp32: bool = accepted(False, "gate and softmax are in fp32 as it is")
    no_moe_gating_use_fp32: bool = routing(False, "gate and softmax in the model's own dtype")
    moe_batch_prioritized_routing: bool = older("drop_policy", "bpr")
    moe_normalize_gate_prob_before_dropping: bool = older("normalize_gate", "before")
    use_moe_pad_mask: bool = accepted(False, "padding is never routed")
    num_workers_valid: int = accepted(
        -1,
        "validation loads by --num-workers processes",
        idle=(because(lambda f: True, "validation loads by --num-workers processes"),),
    )


OF_A_SIDE: Rule = (whole(-1)[0], "give a whole number of layers, at least 0, or -1 for --moe-freq")


@dataclass(frozen=True)
class SidesConfig:
    """What an encoder-decoder has beyond ModelConfig."""

    encoder_moe_freq: int = experts(
        -1,
        "--moe-freq of the encoder alone; 0: no MoE layer there; -1: as --moe-freq",
        unit="layers",
        rule=OF_A_SIDE,
    )
    decoder_moe_freq: int = experts(
        -1,
        "--moe-freq of the decoder alone; 0: no MoE layer there; -1: as --moe-freq",
        unit="layers",
        rule=OF_A_SIDE,
    )


@dataclass(frozen=True)
class TaskConfig:
    """What a run has beyond the MoEConfig of its layers; every task takes it, stock's and users' too."""

    # Whether it fits is for ranks/groups.py to say, which knows the ranks.
    moe_expert_parallel_size: int = parallelism(
        0,
        "ranks that share one set of experts and exchange tokens; it must divide the number of ranks, and "
        "every layer's experts or be a multiple of them; 0 takes the greatest common divisor in a "
        "training, and 1, all experts on every rank, where a model is used",
        unit="ranks",
    )
    moe_local_size: int = communication(
        0,
        "ranks of a node, for --moe-a2a-algorithm and --moe-collective-plans; 0 takes what torchrun, "
        "OpenMPI or Slurm says",
        unit="ranks",
        rule=(AT_LEAST_0[0], "give the ranks of a node, or 0 for what the launcher says"),
        idle=(
            needs(
                lambda f: (
                    f.plans or f.layer.a2a_algorithm != "linear" or f.layer.adaptive == "auto"
                ),
                "--moe-a2a-algorithm 2dh or auto, --moe-collective-plans or --moe-adaptive auto",
            ),
        ),
    )
    moe_use_2dh: bool = older("a2a_algorithm", "2dh", of="task")
    moe_machine_file: str = communication(
        "",
        "what `python -m fairseq_tutel tune` measured, for --moe-a2a-algorithm auto; empty: typical "
        "numbers of the device",
        idle=(needs(lambda f: f.layer.a2a_algorithm == "auto", "--moe-a2a-algorithm auto"),),
    )
    moe_collective_plans: str = communication(
        "",
        "plans of collectives (`python -m fairseq_tutel schedule` makes some), a FILE.json or a folder of "
        "them, for gradients, ZeRO, gathered experts and --moe-a2a-algorithm plan:NAME; what no plan fits "
        "runs by torch; empty: all does",
        idle=(ONE_RANK,),
    )
    moe_adaptive_file: str = parallelism(
        "",
        "where --moe-adaptive auto keeps what it found, for the next run; empty: moe_adaptive.json in "
        "--save-dir",
        idle=(NOT_TUNED,),
    )
    moe_adaptive_window: int = parallelism(
        128,
        "--moe-adaptive auto chooses anew for every window of capacities, as wide as this at least and as "
        "a quarter of where it begins",
        unit="places of an expert",
        rule=whole(1, unit="places"),
        idle=(NOT_TUNED,),
    )
    moe_checkpoint: str = checkpoints(
        "full",
        "full: rank 0 gathers all experts into one file; sharded: every rank writes its own into the "
        "folder experts of --save-dir, and the file says where; any run reads both",
        choices=("full", "sharded"),
    )
    moe_zero_stage: int = memory(
        0,
        "what ranks with the same parameters keep a part of each: 0 nothing, 1 the optimizer's state (and "
        "fp32 masters), 2 gradients too, reduced during the backward; experts among their replicas, all "
        "else among all ranks; the result is the same",
        rule=(
            lambda v: v in (0, 1, 2),
            "give 0 (optimizer state whole on every rank), 1 (cut) or 2 (gradients cut too)",
        ),
        idle=(ONE_RANK,),
    )
    moe_offload_optimizer: bool = memory(
        False,
        "keep the optimizer's state and fp32 masters in host memory, and update there; the result is the "
        "same",
    )
    # Its bounds are those of ranks/guard.py, which sets it before anything is read.
    moe_comm_timeout: int = communication(
        1800,
        "how long a collective waits for another rank before the job ends with an error that names it; 0 "
        "leaves torch's own limits",
        unit="seconds",
        of_any_training=True,
    )
    record_a2a_perf_stats: bool = logging(
        False,
        "log the time of the row exchanges of an update as all_to_all_cpu_time_ms and, on a GPU, "
        "all_to_all_cuda_time_ms; waits for the GPU once a micro-batch",
        unit="milliseconds",
        idle=(ALL_HERE,),
        metas=True,
    )


@dataclass(frozen=True)
class StoreConfig:
    """Where experts are while a model is used, and when they come into memory; every task takes it."""

    moe_expert_store: str = memory(
        "resident",
        "where a model is used, not trained, when experts come into memory: resident, all when it is "
        "opened; on-demand, those with tokens when their layer asks; pregated, these ahead, while the "
        "layer before computes, which needs a model with --moe-pregate; prefetch-all, all experts of the "
        "layer that comes next; the result is the same",
        choices=("resident", *STORE_POLICIES),
    )
    moe_expert_tier: str = memory(
        "auto",
        "where the experts of --moe-expert-store come from: host memory; disk, the files of a sharded "
        "checkpoint where they lie; auto, host on a GPU, else disk",
        choices=("auto", *STORE_TIERS),
        idle=(NO_STORE,),
    )
    moe_expert_cache: str = memory(
        "0",
        "experts that stay in memory after their use, over all layers: how many, or with a unit bytes of "
        "them, as 2GiB",
        rule=(is_cache_size, CACHE_SIZES),
        idle=(NO_STORE,),
    )
    moe_expert_cache_policy: str = memory(
        "lfu",
        "which expert leaves a full cache: lfu, the least often used; lru, the longest unused; fifo, the "
        "one fetched first",
        choices=EVICTIONS,
        idle=(
            NO_STORE,
            needs(lambda f: f.store.moe_expert_cache != "0", "--moe-expert-cache"),
        ),
    )


@dataclass(frozen=True)
class CriterionConfig:
    """What a criterion does with the balance losses; which there are is the model's part."""

    moe_gate_loss_wt: float = balance(
        0.01,
        "weight of the balance loss per unit of sample size",
        of="criterion",
        rule=(
            NOT_NEGATIVE[0],
            "give a finite number, at least 0, which is for no balance loss",
        ),
        idle=(NO_BALANCE_LOSS,),
        metas=True,
    )
    moe_gate_loss_combine_method: str = balance(
        "average",
        "how the layers' balance losses become one",
        of="criterion",
        choices=("average", "sum"),
        idle=(NO_BALANCE_LOSS,),
        metas=True,
    )
    moe_gate_loss_transform: str = balance(
        "none",
        "what is done to the combined loss: neg_log takes -log",
        of="criterion",
        choices=("none", "neg_log"),
        idle=(NO_BALANCE_LOSS,),
        metas=True,
    )
    moe_log_layers: bool = logging(
        False,
        "log every MoE layer's metrics and every expert's load as scalars, for TensorBoard and Weights & "
        "Biases to draw",
        of="criterion",
    )


LAYER = {item.name: item for item in options_in(MoEConfig)}
BY_OWNER = {
    "model": (*options_in(ModelConfig), *LAYER.values(), *options_in(SidesConfig)),
    "task": (*options_in(TaskConfig), *options_in(StoreConfig), *LAYER.values()),
    "criterion": options_in(CriterionConfig),
}


def options_of(owner: str) -> list[Option]:
    """Return all options of the model, the task or the criterion, in order."""
    return [item for item in BY_OWNER[owner] if item.of == owner]


def label_of(name: str) -> str:
    """Return how messages name a field of MoEConfig: by itself, and by its flag where it has one."""
    return LAYER[name].label
