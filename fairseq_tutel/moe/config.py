"""The options of a MoE layer. Flags, hydra keys and docs/flags.md are made from `MoEConfig`.

Options of a model change the result and are saved with the model. Options of a task change only the
execution, so they may differ between runs that load the same checkpoint.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import partial
from typing import ClassVar

from fairseq_tutel.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    CAPACITY,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Rule,
    balance,
    capacity,
    communication,
    documented,
    experts,
    is_whole,
    memory,
    one_of,
    option,
    options_in,
    parallelism,
    refuse_bad_values,
    require,
    routing,
    whole,
)
from fairseq_tutel.parallel.strategy import ALGORITHMS, degree_of, is_algorithm

GATE_TYPES = ("linear", "biased", "cosine")
EXPERT_TYPES = ("ffn", "glu")
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_fast", "gelu_accurate", "tanh", "linear", "swish")

kernels = partial(option, theme="Kernels", of="task")
OVERLAP = whole(1, 32)
MILLION = 1_000_000
GATE = one_of(GATE_TYPES, or_class=True)
GATES: Rule = (lambda v: all(map(GATE[0], gate_types_of(v))), GATE[1])
ALGORITHM: Rule = (
    lambda v: v == "auto" or is_algorithm(v),
    f"choose one of {', '.join(ALGORITHMS)}, auto, or plan:NAME",
)
PARALLEL_TYPE: Rule = (
    lambda v: (r := degree_of(v, slices=1)) is not None and r >= 0,
    "give data, model, auto, or adaptive:r, where r is a whole number",
)
TEMPERATURE: Rule = (lambda v: 0.01 <= v < math.inf, "give a number of at least 0.01")


# The help texts of the balance losses that --moe-balance-loss can name.
BALANCE_LOSSES = {
    "gshard": "an expert's fraction of first choices times its mean probability, summed over experts",
    "gshard_all": "gshard with the fraction of all choices",
    "gshard_sequence": "mean of the gshard_all losses of the sentences",
    "gshard_global": "gshard_all with fractions that are counted over all ranks",
    "switch": "the same as gshard",
    "load_importance": "squared coefficients of variation of the experts' summed probabilities and loads; "
    "needs --moe-gate-noise",
    "load_importance_tutel": "Tutel's variant of load_importance",
    "z": "square of the logarithm of the sum of exponentials of a token's logits",
}


# If the test (second item) of an option's value is true, the option excludes the listed other options.
EXCLUDED: tuple[tuple[str, Callable[["MoEConfig"], object], tuple[str, ...]], ...] = (
    (
        "--moe-choice experts",
        lambda c: c.choice == "experts",
        ("drop_policy", "expert_groups", "second_expert_policy", "rsample", "balance_bias"),
    ),
    ("--moe-prescore, because eom masks outputs", lambda c: c.prescore, ("eom",)),
    ("--moe-residual", lambda c: c.residual, ("cmr",)),
    ("--moe-rsample", lambda c: c.rsample, ("balance_bias",)),
    (
        "--moe-second-expert-policy sampling",
        lambda c: c.second_expert_policy == "sampling",
        ("rsample", "balance_bias"),
    ),
    ("--moe-eval-capacity-factor", lambda c: c.eval_capacity_factor, ("eval_capacity_token_fraction",)),
)  # fmt: skip


@dataclass(frozen=True)
class MoEConfig:
    """The options of one MoE layer. An invalid value raises ValueError.

    Example:
        >>> config = ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8, capacity_factor=1.25)
        >>> config.top_k, config.drop_policy
        (2, 'position')
    """

    # fmt: off
    prefix: ClassVar[str] = "moe_"  # prefix of the fields' names in fairseq's configuration
    # Fields without `of` in their `option(…)` are set from other options of the model or from ModelConfig.
    model_dim: int = option(
        MISSING, rule=AT_LEAST_1, flag="--decoder-embed-dim / --encoder-embed-dim",
        help="D, the width of a token",
    )
    hidden_dim: int = option(
        MISSING, "H, the hidden dimension of an expert", rule=AT_LEAST_1, flag="--moe-expert-ffn-dim"
    )
    num_experts: int = option(
        MISSING, "E, the experts of the layer, over all ranks", rule=AT_LEAST_1, flag="--moe-expert-count"
    )
    top_k: int = routing(2, "experts per token, from 1 to the number of experts", rule=AT_LEAST_1)
    capacity_factor: float = capacity(
        0.0, rule=CAPACITY,
        help="capacity factor f in training: an expert has top_k * ceil(|f| * tokens / experts) slots; 0: "
        "no limit; f < 0: buffers are no larger than the busiest expert needs",
    )
    eval_capacity_factor: float = capacity(
        0.0, rule=CAPACITY,
        help="capacity factor in evaluation and generation; 0: no limit, so an output does not depend on "
        "other sentences of the batch (with --moe-choice experts, 0: the training factor)",
    )
    eval_capacity_token_fraction: float = capacity(
        0.0, rule=CAPACITY,
        help="slots per expert in evaluation as a fraction of the micro-batch's tokens, rounded up; below "
        "0: the training capacity; 0: --moe-eval-capacity-factor gives the capacity",
    )
    eval_sentence_length: int = option(
        0, rule=AT_LEAST_0, unit="tokens", flag="--moe-eval-capacity-max-seqlen",
        help="length of every sentence for eval_capacity_token_fraction; 0 counts the real tokens",
    )
    min_capacity: int = capacity(
        0, unit="slots", rule=whole(0, MILLION), help="minimum slots per expert if the capacity is "
        "limited",
    )
    capacity_multiple: int = capacity(
        1, unit="slots", rule=whole(1, MILLION),
        help="a limited capacity is rounded up to a multiple of this number",
    )
    drop_policy: str = capacity(
        "position", choices=("position", "bpr", "rts", "probability"),
        help="which assignments get an expert's slots first; position: those of earlier tokens; bpr: those "
        "of tokens with a larger best score; rts: those of random tokens (in training); probability: "
        "those with a larger score",
    )
    choice: str = routing(
        "tokens", choices=("tokens", "experts"),
        help="tokens: each token chooses its experts; experts: each expert chooses the tokens with the "
        "highest scores (expert choice; not for causal models)",
    )
    gate_type: str | type = routing(  # noqa: RUF009
        "linear", rule=GATES, or_class=True,
        help="type of the gate: linear; biased (linear with a bias per expert); cosine (cosine similarity "
        "of the projected token and one vector per expert); or a custom package.module.Class; several "
        "types, separated by commas, give several gates for the same experts",
    )
    gate_index: int = routing(0, "index of the gate to use if a layer has several gates", rule=AT_LEAST_0)
    gate_projection_dim: int = routing(
        256, rule=AT_LEAST_1, help="dimension to which the cosine gate projects a token",
    )
    gate_temperature: float = routing(
        0.5, rule=TEMPERATURE, help="initial value of the cosine gate's learned temperature",
    )
    score_function: str = routing(
        "softmax", choices=("softmax", "sigmoid"),
        help="how scores are computed from logits: softmax over the experts, or sigmoid of each logit",
    )
    normalize_gate: str = routing(
        "before", choices=("before", "after", "none"),
        help="when a token's weights are divided by their sum (if top_k > 1): before or after assignments "
        "are dropped; none: never",
    )
    routed_scaling_factor: float = routing(1.0, "factor for all weights after normalization", rule=POSITIVE)
    prescore: bool = routing(False, "multiply the experts' inputs, not their outputs, by the weights")
    eom: float = routing(
        0.0, rule=PROBABILITY,
        help="expert output masking: probability in training that an expert's output for a token is set "
        "to 0; evaluation multiplies experts' outputs by 1 minus this probability",
    )
    fom: float = routing(
        0.0, rule=PROBABILITY,
        help="final output masking: probability in training that the MoE layer's output for a token is "
        "set to 0; evaluation multiplies the output by 1 minus this probability",
    )
    expert_groups: int = routing(
        1, rule=AT_LEAST_1,
        help="number of groups of experts with consecutive IDs; a token first chooses "
        "--moe-groups-per-token groups by the sum of their best scores, then experts in these groups",
    )
    groups_per_token: int = routing(
        1, rule=AT_LEAST_1, help="number of groups from which a token may choose experts",
    )
    second_expert_policy: str = routing(
        "all", choices=("all", "sampling", "random"),
        help="choice of a token's second and later experts; all: the experts with the best scores; "
        "sampling: in training, experts sampled by score; random: as all, but training keeps each of these "
        "experts with probability top_k * weight",
    )
    rsample: bool = routing(
        False,
        help="in training, sample each token's experts by score (Gumbel top-k); weights are the scores",
    )
    gate_noise: float = routing(
        0.0, rule=NOT_NEGATIVE,
        help="Gaussian noise on the logits in training; its standard deviation is this value divided by "
        "the number of experts",
    )
    input_jitter: float = routing(
        0.0, rule=PROBABILITY,
        help="jitter j of the gate's input in training: each element is multiplied by a random number "
        "from 1 - j to 1 + j",
    )
    input_dropout: float = routing(
        0.0, rule=PROBABILITY, help="dropout probability of the gate's input in training",
    )
    gate_fp32: bool = option(True, "compute the gate and its softmax in fp32")
    balance_loss: str = balance(
        "gshard:1",
        help="balance losses of a layer and their relative weights: name:weight, separated by commas, or "
        f"none; the losses are {', '.join(f'{name} ({text})' for name, text in BALANCE_LOSSES.items())}",
    )
    balance_bias: bool = balance(
        False,
        help="balance the load by a bias that is added to the scores only when experts are chosen; after "
        "every update, the bias rises for experts below the mean load and falls for experts above it",
    )
    bias_update_rate: float = balance(
        0.001, rule=NOT_NEGATIVE,
        help="step by which an update changes the bias of --moe-balance-bias; 0 keeps the bias constant",
    )
    expert_type: str | type = experts(  # noqa: RUF009
        "ffn", rule=one_of(EXPERT_TYPES, or_class=True), or_class=True,
        help="type of the experts; ffn: two linear layers with an activation between them; glu: SwiGLU, "
        "W2 (silu(W1 x) * W3 x); package.module.Class: a custom torch module of one expert",
    )
    shared_experts: int = experts(
        0, rule=AT_LEAST_0, help="number of shared experts, which process every token",
    )
    residual: bool = experts(
        False,
        help="residual MoE: mix the experts' output with a dense FFN's output by a learned softmax",
    )
    cmr: bool = experts(
        False,
        help="conditional MoE routing: add a dense FFN of an expert's size; with a learned gate g = "
        "sigmoid(w x + b), the output is g * experts + (1 - g) * FFN",
    )
    cmr_gate_drop: float = experts(
        0.0, flag="--cmr-gate-drop", rule=PROBABILITY,
        help="dropout probability of the gate g of --moe-cmr; a token whose g is 0 uses only the FFN",
    )
    expert_grad_norm: str = experts(
        "world_size", flag="--moe-normalize-expert-grad", choices=("world_size", "sqrt_world_size"),
        help="divisor of an expert's gradient, which is summed over all ranks; world_size: the number of "
        "ranks, as for other parameters; sqrt_world_size: the square root of this number",
    )
    activation: str = option(
        "relu", rule=one_of(ACTIVATIONS), flag="--activation-fn",
        help=f"activation of the experts: {', '.join(ACTIVATIONS)}",
    )
    expert_bias: bool = option(True, "experts have biases")
    activation_dropout: float = option(
        0.0, "dropout probability after the activation", rule=PROBABILITY, flag="--activation-dropout"
    )
    hidden_layer_norm: bool = option(False, "layer norm after the activation, as --scale-fc does")
    init_std: float = option(
        0.0, "standard deviation of initial weights, with zero biases; 0 initializes as nn.Linear does",
        rule=NOT_NEGATIVE,
    )
    backend: str = kernels(
        "auto", choices=("auto", "reference", "triton"),
        help="kernels for routing, dispatch, experts and combine; reference: plain torch; triton: Triton; "
        "auto: Triton on a GPU if Triton is installed, otherwise plain torch",
    )
    recompute_experts: bool = memory(
        False,
        help="recompute the experts' hidden layer in the backward pass, which saves memory and takes time",
    )
    fp32_products: str = kernels(
        "torch", choices=("torch", "tf32x3"),
        help="matrix products of fp32 experts on a GPU; torch: with torch's TF32 setting, which is off by "
        "default; tf32x3: three TF32 products on tensor cores for each product, with a precision of "
        "about 22 bits instead of 24, on NVIDIA GPUs with Triton kernels",
    )
    exchange: str = communication(
        "ragged", choices=("ragged", "padded"),
        help="what an all-to-all sends; ragged: only rows of assignments that have a slot; padded: buffers "
        "of equal size to all ranks",
    )
    a2a_algorithm: str = communication(
        "linear", rule=ALGORITHM,
        help="all-to-all algorithm; linear: every rank sends to every other rank; 2dh: ranks send first "
        "within the node, then between nodes; auto: linear or 2dh, whichever the cost model predicts to "
        "be faster; plan:NAME: a collective plan of --moe-collective-plans",
    )
    a2a_dtype: str = communication(
        "same", choices=("same", "bf16", "fp8"),
        help="transfer dtype of rows in the all-to-all; same: the dtype of the rows; bf16 and fp8 (one "
        "scale per row) lose precision",
    )
    a2a_ffn_overlap_degree: int = communication(
        1, rule=OVERLAP,
        help="number of chunks into which rows are split; the all-to-all of a chunk overlaps with the "
        "experts' computation of another chunk",
    )
    parallel_type: str = parallelism(
        "adaptive:1", rule=PARALLEL_TYPE,
        help="name for a value of --moe-adaptive-r; adaptive:r: the number r; data: 1; model: the number "
        "of ranks per expert; auto: the fastest value, measured during training",
    )
    adaptive_r: int = parallelism(
        -1, rule=whole(-1, MILLION),
        help="number of ranks to which each row is sent; each of these ranks computes a part of the "
        "expert's hidden dimension; 0: no row is sent, and every rank gathers all experts; other values "
        "must divide the number of ranks per expert; -1: --moe-parallel-type gives the number",
    )
    adaptive: str = parallelism(
        "off", choices=("off", "auto"),
        help="auto: measure values of --moe-adaptive-r, --moe-a2a-ffn-overlap-degree and "
        "--moe-a2a-algorithm during training, and keep the fastest; off: use the given values",
    )
    # fmt: on

    def __post_init__(self) -> None:
        refuse_bad_values(self)
        _refuse_contradictions(self)

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise that training adds to gate logits."""
        return self.gate_noise / self.num_experts

    @property
    def gate_types(self) -> list[str | type]:
        """The gate type of each of the layer's gates, in the order of gate indices."""
        return gate_types_of(self.gate_type)


def gate_types_of(gate_type: str | type) -> list[str | type]:
    """Return the gate types in an option value: a class, or names separated by commas."""
    return [name.strip() for name in gate_type.split(",")] if isinstance(gate_type, str) else [gate_type]


LAYER = {item.name: item for item in options_in(MoEConfig)}
MoEConfig.__doc__ = documented(MoEConfig)


def label_of(name: str) -> str:
    """Return the name of a MoEConfig field in messages: the field's name and, if there is one, the flag."""
    return LAYER[name].label


def parse_balance_loss(text: str) -> dict[str, float]:
    """Parse loss weights: "gshard:1,z:0.1" gives {"gshard": 1.0, "z": 0.1}, "none" and "" give {}."""
    weights: dict[str, float] = {}
    for part in text.split(",") if text.strip() not in ("", "none") else ():
        name, _, weight = (word.strip() for word in part.partition(":"))
        if name not in BALANCE_LOSSES or name in weights:
            raise ValueError(
                f"balance_loss (--moe-balance-loss) is {text!r}; give none, or each of "
                f"{', '.join(BALANCE_LOSSES)} at most once, with a weight, such as gshard:1."
            )
        weights[name] = float(weight or "1")
    return weights


def _refuse_contradictions(config: MoEConfig) -> None:
    """Raise ValueError for combinations of options that contradict each other."""

    def given(name: str) -> str:
        return f"{label_of(name)} is {getattr(config, name)}"

    for reason, holds, names in EXCLUDED:
        for name in names if holds(config) else ():
            require(
                getattr(config, name) == LAYER[name].default,
                f"{given(name)}, which cannot be combined with {reason}; remove one of the two options.",
            )
    require(
        config.num_experts % config.expert_groups == 0,
        f"{given('expert_groups')}; give a divisor of {config.num_experts}, the number of experts.",
    )
    check_top_k(config.top_k, config)
    noisy = any(name.startswith("load_importance") for name in parse_balance_loss(config.balance_loss))
    require(
        config.gate_noise > 0 or not noisy,
        f"{given('balance_loss')}, which needs gate noise; set --moe-gate-noise, such as 1.",
    )


def check_top_k(top_k: int, config: MoEConfig) -> None:
    """Raise ValueError if top_k exceeds the number of experts that a token can choose from."""
    groups, kept = config.expert_groups, min(config.groups_per_token, config.expert_groups)
    most = config.num_experts // groups * kept
    if not (is_whole(top_k) and 1 <= top_k <= most):
        label = label_of("top_k")
        raise ValueError(
            f"{label} is {top_k!r}, but a token can choose from {most} experts; give 1 to {most}."
        )
