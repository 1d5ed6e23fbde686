"""From a stock model to its MoE twin: choose layers, check the run, place the experts."""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fairseq_tutel.checkpoint.experts import gather_everywhere
from fairseq_tutel.comm.gradients import is_expert
from fairseq_tutel.kernels import backend_for
from fairseq_tutel.moe.checks import parse_balance_loss
from fairseq_tutel.moe.config import ModelConfig, MoEConfig, SidesConfig, TaskConfig
from fairseq_tutel.moe.initial_strategy import TOKENS, is_tuned, static_degree, static_strategy
from fairseq_tutel.moe.options import flag_of, is_custom, read, refuse_bad_values
from fairseq_tutel.moe.update_tuner import UpdateTuner
from fairseq_tutel.planning.machine import Machine, typical
from fairseq_tutel.plugin.announce import (
    announce,
    announce_exchange,
    announce_idle,
    announce_size,
    warn,
)
from fairseq_tutel.plugin.context import Context
from fairseq_tutel.plugin.differences import end, end_where_it_differs, say_what_differs
from fairseq_tutel.plugin.feed_forward import (
    SIDES,
    children_of,
    chosen_layers,
    layer_facts,
    moe_layers,
    named_stacks,
    pregate_stacks,
    replace_ffn,
    tell_micro_batches,
    watch_token_ids,
)
from fairseq_tutel.plugin.flags import expert_counts, layer_config
from fairseq_tutel.plugin.opened_experts import (
    awaited,
    fetch_when_loaded,
    stays_away,
    store_options,
)
from fairseq_tutel.plugin.parallel_inference import keep_in_step, topology_of_opened
from fairseq_tutel.plugin.plans import tuned_algorithms, use_plans
from fairseq_tutel.plugin.resume import checkpoint_to_load, say_what_changed
from fairseq_tutel.plugin.run_config import (
    complete,
    config_of,
    device_of,
    is_opened,
    is_training,
    refuse_run,
    root_of,
)
from fairseq_tutel.plugin.startup import start_together
from fairseq_tutel.plugin.task_options import give_system_options
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Topology, make_topology
from fairseq_tutel.ranks.rendezvous import ranks_per_node

logger = logging.getLogger(__name__)

# Model options that reach into the FFN and that experts do not follow: (key, values that are fine).
REFUSED_MODEL_OPTIONS = {
    "quant_noise_pq": "quantization noise does not reach experts; set it to 0",
    "quant_noise_scalar": "scalar quantization does not reach experts; set it to 0",
    "base_layers": "BASE layers are another kind of experts; set it to 0",
    "ffn_blocks_to_remove": "FFN pruning does not reach experts; leave it out",
}


class MoEModelMixin:
    """Goes before a model class of fairseq whose `build_model` installs experts."""

    has_experts = True

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags; those of the task come next, which a user may have just registered."""
        give_system_options()
        super().add_args(parser)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load; what experts refuse ends a training in their words: stock would blame the architecture."""
        try:
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            if any(layer.context.trains for layer in moe_layers(self)):  # type: ignore[arg-type]
                end(error)
            raise


def install_experts(
    model: Any,
    cfg: Any,
    task: Any,
    freqs: Mapping[str, int],
    of_sides: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> nn.Module:
    """Replace the FFN of the chosen layers by experts, in place, and return the model.

    Args:
        model: one that has stacks of layers for `named_stacks`, with a feed-forward step like stock's.
        cfg: its configuration, with ModelOptions' keys.
        task: the fairseq task; its configuration may have SystemOptions' keys.
        freqs: --moe-freq of each side.
        of_sides: fields of the MoEConfig of a side's layers that the model's kind decides.

    Raises:
        ValueError: a bad option, or a run that cannot work; the message names option and fix.
    """
    task_cfg, root, training = config_of(task), root_of(task), is_training(task, cfg)
    if training:
        start_together(root, model, task)
    for kind, part in ((TaskConfig, task_cfg), (ModelConfig, cfg), (SidesConfig, cfg)):
        refuse_bad_values(read(kind, part))
    chosen = _choose(model, cfg, freqs)
    counts = expert_counts(cfg.moe_expert_count, len(chosen))
    configs = [
        layer_config(
            cfg,
            task_cfg,
            count,
            **layer_facts(layer, _get(cfg, "activation_fn") or "relu") | of_sides.get(side, {}),
        )
        for count, (side, name, layer) in zip(counts, chosen, strict=True)
    ]
    requested = read(TaskConfig, task_cfg).moe_expert_parallel_size
    local = node_size(configs[0], task_cfg)
    ahead = read(ModelConfig, cfg).moe_pregate
    opened, device = is_opened(cfg), device_of(root)
    store = store_options(task_cfg, configs[0], opened, ahead > 0, device)
    degree_of = None if is_tuned(configs[0]) else functools.partial(static_degree, configs[0])
    if training:
        topology = make_topology(counts, requested, local, degree_of)
        talks = any("gshard_global" in parse_balance_loss(c.balance_loss) for c in configs)
        sliced = any(topology.slices(count) > 1 for count in counts)
        refuse_run(root, model, topology, talks, sliced, ahead)
        use_plans(task_cfg, topology, configs[0])
        complete(root)
        say_what_changed(checkpoint_to_load(root.checkpoint), cfg)
    else:
        topology = topology_of_opened(requested, counts, local, degree_of)
    if not stays_away(store):
        refuse_sizes(configs, topology)
    seed = int(root.common.seed) if root is not None else 1
    context = Context(trains=training)
    for config, (_, name, layer) in zip(configs, chosen, strict=True):
        experts = awaited(config, topology, store) if opened else None
        replace_ffn(layer, config, topology, seed, name, context, experts)
    if "hash" in configs[0].gate_types:
        watch_token_ids(model, context)
    if ahead:
        pregate_stacks(model, ahead)
    tell_micro_batches(model)
    model.register_load_state_dict_pre_hook(end_where_it_differs if training else say_what_differs)
    # torch's DistributedDataParallel reads this name: it neither broadcasts nor reduces experts.
    model._ddp_params_and_buffers_to_ignore = [
        name for name, parameter in model.named_parameters() if is_expert(parameter)
    ]
    if training:
        if topology.expert_parallel_size > 1:
            context.generate_by(_gathering(model, topology))
        _choose_algorithm(model, task_cfg, root)
        task.moe_tuner = _tuner_of(model, cfg, task_cfg, root)
    else:
        keep_in_step(model)
    if stays_away(store):
        fetch_when_loaded(model, store)
    announce(configs, topology, backend_for(configs[0].backend, device))
    announce_size(model)
    if training:
        layers, half = moe_layers(model), root.common.fp16 or root.common.bf16
        announce_exchange(layers)
        announce_idle(layers, cfg, task_cfg, local, half)
    warn(configs[0], has_decoder=any("decoder" in name for _, name, _ in chosen))
    return model


def _gathering(model: nn.Module, topology: Topology) -> Callable[[], None]:
    """Return what lets every rank generate alone, and says once what that takes. Collective."""
    said: list[int] = []

    def gather() -> None:
        num_bytes = gather_everywhere(model, topology)
        if not said:
            said.append(num_bytes)
            logger.info(
                "the model generates while it is trained: for that each rank gathers all experts, %.1f MB, "
                "since beams differ in length; --moe-expert-parallel-size 1 would keep them there",
                said[0] / 1e6,
            )

    return gather


def _choose_algorithm(model: nn.Module, task_cfg: Any, root: Any) -> None:
    """Let --moe-a2a-algorithm auto choose by the run's micro-batches and its machine.

    Raises:
        ValueError: a --moe-machine-file that holds no machine.
    """
    layers = moe_layers(model)
    if layers[0].config.a2a_algorithm != "auto":
        return
    machine = _machine_of(task_cfg, root)
    tokens, half = _tokens_of(root, task_cfg), root.common.fp16 or root.common.bf16
    strategies = [
        static_strategy(layer.config, layer.topology, tokens, machine, 2 if half else 4)
        for layer in layers
    ]
    # Another file or another GPU on one node must not make its ranks go another way.
    strategies = world.told_by_first(strategies, "the agreement on --moe-a2a-algorithm auto")
    for layer, strategy in zip(layers, strategies, strict=True):
        layer.follow(strategy)
    logger.info(
        "--moe-a2a-algorithm auto: %s, by the numbers of %s", strategies[0].algorithm, machine.name
    )


def _machine_of(task_cfg: Any, root: Any) -> Machine:
    path, device = read(TaskConfig, task_cfg).moe_machine_file, device_of(root)
    name = torch.cuda.get_device_name() if device.type == "cuda" else None
    try:
        return Machine.from_json(Path(path)) if path else typical(name)
    except ValueError as error:
        raise ValueError(f"--moe-machine-file: {error}") from None


def _tokens_of(root: Any, task_cfg: Any) -> int:
    """Return the tokens of a rank's micro-batch, about."""
    sentences = root.dataset.batch_size or 0
    return (
        root.dataset.max_tokens or sentences * (_get(task_cfg, "tokens_per_sample") or 32) or TOKENS
    )


def _tuner_of(model: nn.Module, cfg: Any, task_cfg: Any, root: Any) -> UpdateTuner | None:
    """Return the tuner of a training that asks for one; None where it has no choice."""
    layers = moe_layers(model)
    first = layers[0]
    if not is_tuned(first.config) or first.topology.expert_parallel_size == 1:
        return None
    options = read(TaskConfig, task_cfg)
    path = options.moe_adaptive_file or os.path.join(root.checkpoint.save_dir, "moe_adaptive.json")
    choices: dict[str, Any] = {}
    if first.config.adaptive != "auto":  # r alone
        choices = {"overlaps": (first.strategy.overlap,), "algorithms": (first.strategy.algorithm,)}
    elif options.moe_collective_plans:
        machine, size = _machine_of(task_cfg, root), _tokens_of(root, task_cfg)
        size *= 4 * first.config.top_k * first.config.model_dim
        algorithms = tuned_algorithms(first, task_cfg, machine, size)
        # Another machine's file on one node must not let its ranks try others.
        choices = {"algorithms": world.told_by_first(algorithms, "the agreement on all-to-alls")}
    common = root.common
    conditions = {
        "precision": [
            key
            for key in ("fp16", "bf16", "amp", "memory_efficient_fp16", "memory_efficient_bf16")
            if common[key]
        ],
        "update_freq": list(root.optimization.update_freq),
        "zero_stage": options.moe_zero_stage,
        "checkpoint_activations": bool(_get(cfg, "checkpoint_activations")),
    }
    machine = _machine_of(task_cfg, root)
    window = options.moe_adaptive_window
    return UpdateTuner(layers, window, path, conditions=conditions, machine=machine, **choices)


def node_size(config: MoEConfig, task_cfg: Any) -> int:
    """Return the ranks of a node where rows may go over nodes, else 0."""
    if config.a2a_algorithm == "linear" and config.adaptive == "off":
        return 0
    return read(TaskConfig, task_cfg).moe_local_size or ranks_per_node()


def refuse_sizes(configs: Sequence[MoEConfig], topology: Topology) -> None:
    """Refuse experts whose weights alone, in fp32, are more than the memory of this machine.

    Raises:
        ValueError: naming the options, the bytes and the fix.
    """
    if torch.get_default_device().type == "meta":
        return  # which has sizes alone
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = sum(
        4
        * 2
        * config.model_dim
        * config.hidden_dim
        * config.num_experts
        // topology.expert_parallel_size
        for config in configs
        if not is_custom(config.expert_type)  # a class's weights may be of any size
    )
    if needed > memory:
        raise ValueError(
            f"--moe-expert-count {configs[0].num_experts} of --moe-expert-ffn-dim {configs[0].hidden_dim} "
            f"makes {needed / 1e9:,.0f} GB of weights on a rank, and the machine has {memory / 1e9:,.0f} "
            "GB of memory; lower one of them, or give more ranks."
        )


def refuse_options(cfg: Any) -> None:
    """Refuse model options that experts cannot follow; called before the stock model is built.

    Raises:
        ValueError: naming option, value and fix.
    """
    for key, reason in REFUSED_MODEL_OPTIONS.items():
        value = _get(cfg, key)
        if value not in (None, 0, 0.0, -1):
            raise ValueError(f"{flag_of(key)} is {value}: {reason}.")


def _get(cfg: Any, key: str) -> Any:
    try:
        return getattr(cfg, key, None)
    except Exception:  # a TransformerConfig's missing nested key, an unresolved interpolation
        return None


def _choose(
    model: nn.Module, cfg: Any, freqs: Mapping[str, int]
) -> list[tuple[str, str, nn.Module]]:
    """Return (side, qualified name of fc1, layer) of every MoE layer, in the order of the stacks."""
    chosen, stacks = [], []
    for side, name, layers in named_stacks(model):
        freq = freqs[side]
        has_own = side in SIDES and len(freqs) > 1
        flag = f"--{side}-moe-freq / --moe-freq" if has_own else "--moe-freq"
        stack = children_of(layers)
        stacks.append(f"{len(stack)} {side} layers, {flag} {freq}")
        # Of a model that was pruned to some of its layers, those that had experts before.
        kept = _get(cfg, f"{side}_layers_to_keep")
        numbers = sorted(map(int, kept.split(","))) if kept else range(len(stack))
        indices = chosen_layers(numbers, freq)
        if freq > 0 and not indices:
            logger.warning("no %s layer has experts: %s", side, stacks[-1])
        chosen += [(side, f"{name}.{i}.fc1", stack[i]) for i in indices]
    if not chosen:
        raise ValueError(
            f"no layer becomes a MoE layer ({'; '.join(stacks)}); set --moe-freq to at least 1 and at "
            "most the number of layers, or choose the dense architecture."
        )
    return chosen
