"""Replaces FFNs of a fairseq model by experts: chooses layers, places experts on ranks, builds experts."""

import functools
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from fairseq_tutel.checkpoint.experts import gather_everywhere
from fairseq_tutel.inference.pregate import pregate, refuse_too_far
from fairseq_tutel.kernels import backend_for
from fairseq_tutel.moe.config import MoEConfig, parse_balance_loss
from fairseq_tutel.option import flag_of, read, refuse_bad_values
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.groups import make_topology
from fairseq_tutel.parallel.rendezvous import ranks_per_node
from fairseq_tutel.plugin import announce
from fairseq_tutel.plugin.feed_forward import (
    SIDES,
    Context,
    MoEFeedForward,
    children_of,
    layer_facts,
    models_of,
    moe_layers,
    named_stacks,
    replace_ffn,
)
from fairseq_tutel.plugin.opening import offload
from fairseq_tutel.plugin.opening.several_ranks import running_command, topology_of_opened
from fairseq_tutel.plugin.options import ModelConfig, SidesConfig
from fairseq_tutel.plugin.plans import use_plans
from fairseq_tutel.plugin.registration.flags import expert_counts, layer_config
from fairseq_tutel.plugin.registration.variants import give_system_options
from fairseq_tutel.plugin.run_state import (
    RUN,
    config_of,
    device_of,
    is_opened,
    is_training,
    root_of,
)
from fairseq_tutel.plugin.training.epoch_iterator import set_update_freq
from fairseq_tutel.plugin.training.options import TaskConfig
from fairseq_tutel.plugin.training.startup import complete, refuse_run, start_together
from fairseq_tutel.plugin.training.task import give_mixin
from fairseq_tutel.plugin.training.tuning import choose_algorithm, option, tuner_of

logger = logging.getLogger(__name__)

# Options of FFNs that experts do not support, each with the reason and the fix.
REFUSED_MODEL_OPTIONS = {
    "quant_noise_pq": "experts do not support quantization noise; set it to 0",
    "quant_noise_scalar": "experts do not support scalar quantization noise; set it to 0",
    "base_layers": "BASE layers are a different kind of experts; set it to 0",
    "ffn_blocks_to_remove": "experts do not support FFN pruning; remove it",
}


class MoEModelMixin:
    """Mixin for a fairseq model class whose `build_model` replaces FFNs by experts."""

    has_experts = True

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the flags of the MoE model, and add `SystemOptions` to tasks without them."""
        give_system_options()
        super().add_args(parser)  # type: ignore[misc]


def chosen_layers(numbers: Sequence[int], freq: int) -> list[int]:
    """Return the indices of the layers that get experts, every freq-th layer as in Meta's fairseq.

    `numbers` are layer numbers in the complete model. `freq` is --moe-freq; with 0, no layer gets experts.
    """
    return [index for index, i in enumerate(numbers) if freq and (i + 1) % freq == 0]


def install_experts(
    model: Any,
    cfg: Any,
    task: Any,
    freqs: Mapping[str, int],
    of_sides: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> nn.Module:
    """Replace the FFNs of the chosen layers by experts, in place, and return the model.

    Args:
        model: a model whose layers `named_stacks` finds, and whose FFNs are like fairseq's.
        cfg: the model's configuration, with the keys of ModelOptions.
        task: the task, which gets methods for training experts; None for a pretrained model inside a model.
        freqs: maps "encoder" and "decoder", or each stage of an image model, to its value of --moe-freq.
        of_sides: maps the same names to MoEConfig fields that depend on the kind of model.
    """
    installation = _Installation(model, cfg, task)
    installation.choose(freqs)
    installation.configure(of_sides)
    installation.place()
    installation.build()
    installation.log()
    return model


class _Chosen(NamedTuple):
    """A layer that will get experts; `side` is encoder, decoder or a stage of an image model."""

    side: str
    name: str
    layer: nn.Module
    num_experts: int  # Number of experts, or 0 for a stock layer.


class _Installation:
    """Replaces FFNs of one model by experts; callers call the methods in the order of their definition."""

    def __init__(self, model: Any, cfg: Any, task: Any) -> None:
        self.model, self.cfg, self.task = model, cfg, task
        self.task_cfg, self.root = config_of(task), root_of(task)
        self.training, self.opened = is_training(task, cfg), is_opened(cfg)
        self.device = device_of(self.root)
        if self.training:
            start_together(self.root, model, task)
        self.options = read(TaskConfig, self.task_cfg)
        for options in (self.options, read(ModelConfig, cfg), read(SidesConfig, cfg)):
            refuse_bad_values(options)
        self.ahead = read(ModelConfig, cfg).moe_pregate

    def choose(self, freqs: Mapping[str, int]) -> None:
        """Choose the layers that get experts; a pretrained inner model keeps the experts that it has."""
        self.chosen: list[_Chosen] = []  # The layers are in the model's order.
        stacks = []
        for side, name, layers in named_stacks(self.model):
            freq, stack = freqs[side], children_of(layers)
            has_own = side in SIDES and len(freqs) > 1
            flag = f"--{side}-moe-freq / --moe-freq" if has_own else "--moe-freq"
            stacks.append(f"{len(stack)} {side} layers, {flag} {freq}")
            # If --…-layers-to-keep removes layers, `numbers` are the layer numbers in the complete model.
            numbers = self._kept_layers(side) or range(len(stack))
            ffns = [getattr(layer, "fc1", None) for layer in stack]
            counts = [ffn.config.num_experts if isinstance(ffn, MoEFeedForward) else 0 for ffn in ffns]
            indices = chosen_layers(numbers, freq)
            if any(counts):
                indices = [i for i, count in enumerate(counts) if count]
            if freq > 0 and not indices:
                logger.warning("no %s layer gets experts: the model has %s", side, stacks[-1])
            self.chosen += [_Chosen(side, f"{name}.{i}.fc1", stack[i], counts[i]) for i in indices]
        if not self.chosen:
            raise ValueError(
                f"no layer gets experts ({'; '.join(stacks)}); give a --moe-freq of at least 1 and at most "
                "the number of layers, or the --arch of the dense model."
            )

    def _kept_layers(self, side: str) -> list[int]:
        """Return the layer numbers that --…-layers-to-keep names, or [] if all layers are kept."""
        kept = option(self.cfg, f"{side}_layers_to_keep")
        return sorted(map(int, kept.split(","))) if kept else []

    def configure(self, of_sides: Mapping[str, dict[str, Any]]) -> None:
        activation = option(self.cfg, "activation_fn") or "relu"
        counts = [chosen.num_experts for chosen in self.chosen]
        if not all(counts):
            given = expert_counts(self.cfg.moe_expert_count, len(self.chosen))
            counts = [count or number for count, number in zip(counts, given, strict=True)]
        self.configs: list[MoEConfig] = []
        for count, chosen in zip(counts, self.chosen, strict=True):
            facts = layer_facts(chosen.layer, activation) | of_sides.get(chosen.side, {})
            facts["eval_sentence_length"] = _sentence_length(self.cfg, chosen.side)
            self.configs.append(layer_config(self.cfg, self.task_cfg, count, **facts))
        first = self.configs[0]
        crosses_nodes = first.a2a_algorithm != "linear" or first.adaptive != "off"
        # `local` is the number of ranks per node, or 0 if unknown or not needed.
        self.local = (self.options.moe_local_size or ranks_per_node()) if crosses_nodes else 0
        self.store = offload.store_options(self.task_cfg, self.opened, self.ahead > 0, self.device)

    def place(self) -> None:
        """Assign experts to ranks, which is a collective if experts are spread over ranks."""
        first, counts = self.configs[0], [config.num_experts for config in self.configs]
        requested = self.options.moe_expert_parallel_size
        if self.training:
            set_update_freq(self.root, world.size())
            self.topology = make_topology(counts, requested, self.local)
            RUN.update(topology=self.topology)
            talks = any("gshard_global" in parse_balance_loss(c.balance_loss) for c in self.configs)
            sliced = any(self.topology.slices(count) > 1 for count in counts)
            refuse_run(self.root, self.model, self.topology, talks, sliced, self.ahead)
            use_plans(self.task_cfg, self.topology, first)
            complete(self.root)
        else:
            is_teacher = getattr(self.task, "is_of_teacher", False)
            self.topology = topology_of_opened(requested, counts, self.local, is_teacher)

    def build(self) -> None:
        """Replace the FFNs of the chosen layers by experts, and register hooks on the model."""
        model, command = self.model, running_command()
        seed = int(self.root.common.seed) if self.root is not None else 1
        if self.training:
            shared = self.topology.expert_parallel_size > 1
            local_drop = read(ModelConfig, self.cfg).moe_local_drop
            gather = functools.partial(gather_everywhere, model, self.topology) if shared else None
            context = Context(True, gather, local_drop=local_drop, seed=seed)
        else:
            context = Context(wait_for_turn=command.wait_for_turn if command else None)
        for config, chosen in zip(self.configs, self.chosen, strict=True):
            experts = offload.meta_experts(config, self.topology, self.store) if self.opened else None
            replace_ffn(chosen.layer, config, self.topology, seed, chosen.name, context, experts)
        if self.ahead:
            _pregate_stacks(model, self.ahead, read(SidesConfig, self.cfg).moe_pregate_sides)
        _watch_micro_batches(model)
        tuner = None
        if self.training:
            choose_algorithm(model, self.task_cfg, self.root)
            tuner = tuner_of(model, self.cfg, self.task_cfg, self.root)
        elif command is not None:
            command.keep_in_step(moe_layers(model))
        if offload.is_offloaded(self.store):
            offload.fetch_when_loaded(model, self.store)
        if (dtype := offload.inference_dtype(self.cfg, self.task)) is not None:
            model.to(dtype)
            offload.quantize_when_loaded(model, self.task, self.device)
        if self.task is not None:
            give_mixin(self.task)
            self.task.take_experts(moe_layers(model), tuner)

    def log(self) -> None:
        backend = backend_for(self.configs[0].backend, self.device)
        announce.log_experts(moe_layers(self.model), backend)
        announce.log_size(self.model)


def _sentence_length(cfg: Any, side: str) -> int:
    """Return the sentence length that --moe-eval-capacity-max-seqlen uses, or 0 without this option."""
    fraction = option(cfg, "moe_eval_capacity_token_fraction") or 0
    if fraction <= 0 or not option(cfg, "moe_eval_capacity_max_seqlen"):
        return 0
    key = "max_source_positions" if side == "encoder" else "max_target_positions"
    positions = option(cfg, key)
    if not positions:
        raise ValueError(
            f"--moe-eval-capacity-max-seqlen is set, but the {side} of this model has no {flag_of(key)}; "
            "remove --moe-eval-capacity-max-seqlen."
        )
    return int(positions)


def _pregate_stacks(model: nn.Module, ahead: int, sides: str) -> None:
    """Make each gate read the input of the MoE layer that is `ahead` MoE layers earlier (--moe-pregate).

    `sides` is the value of --moe-pregate-sides: both, encoder or decoder.
    """
    every = {side: moe_layers(layers) for side, _, layers in named_stacks(model) if moe_layers(layers)}
    stacks = every if sides == "both" else {sides: every.get(sides, [])}
    refuse_too_far(ahead, {side: len(layers) for side, layers in stacks.items()})
    for layers in stacks.values():
        if len(layers) > ahead:
            pregate(layers, ahead)


def _watch_micro_batches(model: nn.Module) -> None:
    """Register hooks that begin a new micro-batch in the MoE layers at each call of the model."""
    # Copying a model also copies this partial function, so the copy's hook has the copied layers.
    for part in models_of(model).values():
        part.register_forward_pre_hook(functools.partial(_begin_micro_batch, moe_layers(part)))


def _begin_micro_batch(layers: Sequence[MoEFeedForward], *_: Any) -> None:
    for layer in layers:
        layer.begin_micro_batch()


def refuse_options(cfg: Any) -> None:
    """Raise an error if the configuration has model options that experts do not support.

    The function is called before fairseq builds the stock model.
    """
    for key, reason in REFUSED_MODEL_OPTIONS.items():
        value = option(cfg, key)
        if value not in (None, 0, 0.0, -1):
            raise ValueError(f"{flag_of(key)} is {value}: {reason}.")
