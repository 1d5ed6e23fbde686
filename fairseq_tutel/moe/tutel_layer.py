"""An MoE layer with Tutel's arguments; docs/tutel.md lists all arguments and differences."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel.moe import tutel_arguments as arguments
from fairseq_tutel.moe.adaptive import allowed_degrees
from fairseq_tutel.moe.build import hashed_seed
from fairseq_tutel.moe.capacity import Capacity
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.gates import build_gate, reset_gate
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.tutel_experts import (
    ExpertContext,
    ModuleExperts,
    build_from_dict,
    can_slice,
    check_experts,
    drawn_from,
)
from fairseq_tutel.option import AT_LEAST_1, require
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.collectives import all_reduce
from fairseq_tutel.parallel.groups import Topology, make_topology, topology_within
from fairseq_tutel.parallel.rendezvous import ranks_per_node
from fairseq_tutel.parallel.strategy import Strategy

logger = logging.getLogger(__name__)


def _part_of_strategy(name: str, meaning: str) -> Any:
    """Return a property that reads and sets attribute `name` of a layer's strategy."""

    def change(layer: "TutelMoELayer", value: int) -> None:
        layer.moe.follow(layer._strategy(**{name: value}))

    return property(lambda layer: getattr(layer.moe.strategy, name), change, doc=meaning)


class TutelMoELayer(nn.Module):
    """A MoELayer with Tutel's arguments for the constructor and for calls, in Tutel's order.

    The layer does not change the dicts. Arguments of a call apply only to that call. docs/tutel.md
    describes all arguments.

    Args:
        gate_type: the gate, such as {"type": "top", "k": 2, "capacity_factor": 1.25}, or a list of gates.
        model_dim: the width of a token.
        experts: the experts, such as {"type": "ffn", "num_experts_per_device": 4,
            "hidden_size_per_expert": 256}.

    Raises:
        ValueError: an argument, or a key of a dict, is unknown or invalid.

    Example:
        >>> experts = {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 256}
        >>> layer = ft.moe_layer({"type": "top", "k": 2}, model_dim=64, experts=experts)
        >>> y = layer(torch.randn(8, 16, 64))
        >>> y.shape, y.l_aux.shape
        (torch.Size([8, 16, 64]), torch.Size([]))
    """

    def __init__(
        self,
        gate_type: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        model_dim: int,
        experts: Mapping[str, Any],
        scan_expert_func: Callable[[str, nn.Parameter], Any] | None = None,
        result_func: Callable[[Tensor], Any] | None = None,
        group: dist.ProcessGroup | None = None,
        seeds: Sequence[int | None] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
        *,
        pad_samples: bool | None = None,
        tutel_capacity: bool = False,
    ) -> None:
        super().__init__()
        arguments.check("model_dim", model_dim, AT_LEAST_1)
        if pad_samples is not None:
            arguments.log_no_effect("pad_samples", pad_samples)
        self.is_postscore = is_postscore
        self.batch_prioritized_routing = batch_prioritized_routing
        self.normalize_gate = normalize_gate
        self.is_gshard_loss = is_gshard_loss
        self.group = group
        self.tutel_capacity = arguments.check_switch("tutel_capacity", tutel_capacity)
        gate_seed, expert_seed, seed_after = arguments.check_seeds(seeds)
        per_device, fields = check_experts(experts, model_dim)
        num_experts = arguments.count_experts(per_device, group)
        self.num_global_experts = num_experts
        self.sharded_count = max(1, world.size(group) // num_experts)
        self.valid_rs = list(allowed_degrees(self.sharded_count))
        sliced = self.sharded_count > 1 and can_slice(experts, model_dim, self.sharded_count)
        topology = _topology(group, num_experts, sliced, use_2dh)
        if arguments.check_switch("use_2dh", use_2dh) and topology.grid is None:
            arguments.log_no_effect("use_2dh", True)
        strategy = arguments.changed(
            Strategy(algorithm="2dh" if use_2dh else "linear"),
            self.sharded_count,
            topology.slices(num_experts),
            overlap=a2a_ffn_overlap_degree,
            parallel_type=parallel_type,
        )
        agreed = _agreed_seeds(gate_seed, expert_seed, self.sharded_count, group)
        fields = {**fields, "num_experts": num_experts, **self._fields()}
        self.moe = _build(arguments.gate_dicts(gate_type), experts, fields, topology, group, agreed)
        self.moe.follow(strategy)
        self.experts.save_by_rank()
        if topology.num_replicas > 1:
            logger.warning(
                "%d ranks hold a replica of each expert; outside of fairseq, reduce their gradients with "
                "fairseq_tutel.parallel.gradients.reduce_expert_gradients, as in docs/tutel.md: otherwise "
                "the replicas diverge.",
                topology.num_replicas,
            )
        self.result_func = result_func
        if scan_expert_func is not None:
            for name, parameter in self.experts.expert_parameters().items():
                scan_expert_func(name, parameter)
        if seed_after is not None:
            torch.manual_seed(seed_after)

    def forward(
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """Route every token of the input [..., model_dim] through its experts; see docs/tutel.md.

        Return `result_func(y)`, or y without a `result_func`. y has the shape and dtype of the input,
        unless experts have a different output dimension. `y.l_aux` is the balance loss, a scalar with grad.
        """
        given = {"megablocks_size": megablocks_size, "inequivalent_tokens": inequivalent_tokens}
        call: dict[str, Any] = {"capacity_factor": capacity_factor, "top_k": top_k}
        for name, value in {**given, **call}.items():
            if value is not None:
                arguments.check(name, value, arguments.CALL_RULES[name])
        if megablocks_size > 0:
            arguments.log_no_effect("megablocks_size", megablocks_size)
        if inequivalent_tokens and not self.tutel_capacity:
            arguments.log_no_effect("inequivalent_tokens", True)
        self._update_config()
        strategy = self._strategy(a2a_ffn_overlap_degree, adaptive_r)
        if top_k is not None:
            call["top_k"] = min(top_k, self.num_global_experts)
        call["gate_index"] = gate_index
        outer, token = arguments.split_shape(input, reserve_dims, self.moe.config.model_dim)
        x_TD = input.reshape(outer.numel(), token.numel())
        weight = next(self.experts.parameters(), None)
        if weight is not None and not torch.is_autocast_enabled(input.device.type):
            x_TD = x_TD.to(weight.dtype)
        if self.tutel_capacity:
            num_tokens = len(x_TD)
            if inequivalent_tokens and self.topology.world_size > 1:
                most = torch.tensor(num_tokens, device=x_TD.device)
                all_reduce(most, "the agreement on the number of tokens", self.group, dist.ReduceOp.MAX)
                num_tokens = int(most)
            multiple = self.sharded_count * strategy.overlap
            call["capacity_factor"] = self._capacity(num_tokens, multiple, **call)
        kept = self.moe.strategy
        self.moe.follow(strategy)
        try:
            y_TD, out, balance_loss = self._run(x_TD, token, call)
        finally:
            self.moe.follow(kept)
        y = y_TD.view(*outer, *out).to(input.dtype)
        y.l_aux = balance_loss  # type: ignore[attr-defined]
        return y if self.result_func is None else self.result_func(y)

    def _run(
        self, x_TD: Tensor, token: torch.Size, call: dict[str, Any]
    ) -> tuple[Tensor, tuple[int, ...], Tensor]:
        """Run the layer; return the output, the dimensions of one output token, and the balance loss."""
        if isinstance(self.experts, ModuleExperts):
            with self.experts.features(token) as returned:
                y_TD, output = self.moe(x_TD, **call)
                return y_TD, returned(), output.balance_loss
        y_TD, output = self.moe(x_TD, **call)
        as_given = y_TD.shape[1] == token.numel()
        return y_TD, tuple(token) if as_given else (y_TD.shape[1],), output.balance_loss

    def _fields(self) -> dict[str, Any]:
        """Return the MoEConfig fields that are set by attributes of the layer."""

        def is_on(name: str) -> bool:
            return arguments.check_switch(name, getattr(self, name))

        return {
            "prescore": not is_on("is_postscore"),
            "drop_policy": "bpr" if is_on("batch_prioritized_routing") else "position",
            "normalize_gate": "before" if is_on("normalize_gate") else "none",
            "balance_loss": "gshard" if is_on("is_gshard_loss") else "load_importance_tutel",
        }

    def _update_config(self) -> None:
        """Apply changes to attributes of the layer and its gates since the last call."""
        configs, of_layer = self.moe.gate_configs, self._fields()
        fields = [
            {**of_layer, **arguments.set_fields(gate, i, config)}
            for i, (gate, config) in enumerate(zip(self.gates, configs, strict=True))
        ]
        if not all(
            own.items() <= vars(config).items() for config, own in zip(configs, fields, strict=True)
        ):
            for i, own in enumerate(fields):
                arguments.check_noise(i, own)
            configs = [dataclasses.replace(c, **own) for c, own in zip(configs, fields, strict=True)]
            self.moe.configure(configs[0], configs)

    def _strategy(self, overlap: int | None = None, adaptive_r: int | None = None) -> Strategy:
        """Return the execution strategy of one call; None keeps the layer's value."""
        slices = self.experts.part.slices
        return arguments.changed(self.moe.strategy, self.sharded_count, slices, overlap, adaptive_r)

    def _capacity(
        self,
        num_tokens: int,
        multiple: int,
        gate_index: int,
        capacity_factor: float | None,
        top_k: int | None,
    ) -> Capacity:
        _, config = self.moe.gate_at(gate_index)
        factor = config.capacity_factor if capacity_factor is None else capacity_factor
        top_k = config.top_k if top_k is None else top_k
        return arguments.tutel_capacity(factor, top_k, self.num_global_experts, num_tokens, multiple)

    a2a_ffn_overlap_degree = _part_of_strategy("overlap", "The number of chunks of an exchange; settable.")
    adaptive_degree = _part_of_strategy("adaptive_r", "The r of `parallel_type`, one of `valid_rs`.")

    @property
    def num_local_experts(self) -> int:
        """The number of experts, or expert shards, of this rank."""
        return self.experts.num_local

    @property
    def experts(self) -> ExpertStack:
        """The experts of this rank."""
        return self.moe.experts

    @property
    def gates(self) -> list[nn.Module]:
        """The gates, in the order of `gate_index`."""
        return [self.moe.gate, *self.moe.other_gates]

    @property
    def topology(self) -> Topology:
        """The process groups of this layer's ranks."""
        return self.moe.topology

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs of the gates ('gate') or experts ('local_experts')."""
        require(
            param_type in ("gate", "local_experts"),
            f"param_type is {param_type!r}; choose gate or local_experts.",
        )
        if param_type == "local_experts":
            return self.experts.named_parameters()
        return nn.ModuleList(self.gates).named_parameters()

    @staticmethod
    def global_expert_count(num_local_experts: float, group: dist.ProcessGroup | None = None) -> int:
        """Return the number of experts on all ranks of a group, from `num_experts_per_device`."""
        return arguments.count_experts(num_local_experts, group)


moe_layer = TutelMoELayer


def _build(
    gate_type: Sequence[Mapping[str, Any]],
    experts: Mapping[str, Any],
    fields: dict[str, Any],
    topology: Topology,
    group: dist.ProcessGroup | None,
    seeds: tuple[int, int],
) -> MoELayer:
    """Build the gates, experts and MoELayer; `fields` has the values that the gates' configs share."""
    gate_seed, expert_seed = seeds
    model_dim, num_experts = fields["model_dim"], fields["num_experts"]
    configs, gates = [], []
    for i, gate in enumerate(gate_type):
        with drawn_from(hashed_seed(gate_seed, "", -1, _gate_name(i))):
            module = arguments.custom_gate(gate, model_dim, num_experts)
        own = {**fields, **arguments.gate_fields(gate, num_experts, module)}
        arguments.check_noise(i, own)
        configs.append(MoEConfig(**own))
        gates.append(build_gate(configs[i], configs[i].gate_type) if module is None else module)
    part = topology.part(num_experts)
    context = ExpertContext(
        model_dim=model_dim,
        num_global_experts=num_experts,
        num_local_experts=part.num_local,
        world_size=topology.world_size,
        group=group,
    )
    stack = build_from_dict(experts, configs[0], part, context)
    layer = MoELayer(
        configs[0], topology, seed=expert_seed, gate_configs=configs, gates=gates, experts=stack
    )
    for i, built in enumerate(gates):
        reset_gate(built, gate_seed, "", _gate_name(i))
        arguments.show_fields(built, configs[i])
    return layer


def _gate_name(index: int) -> str:
    return f"gate{index or ''}"


def _topology(group: dist.ProcessGroup | None, num_experts: int, sliced: bool, use_2dh: bool) -> Topology:
    """Return the process groups for a layer; if `sliced`, each rank has a shard of one expert."""
    if group is not None:
        return topology_within(group, num_experts, sliced)
    return make_topology([num_experts], world.size() if sliced else 0, ranks_per_node() if use_2dh else 0)


def _agreed_seeds(
    gate: int | None, experts: int | None, shared_by: int, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """Return the seeds of gates and experts; ranks that share an expert use the first rank's seed."""
    if gate is None or experts is None:
        drawn = int(torch.randint(2**62, ()))
        gate = drawn if gate is None else gate
        experts = drawn if experts is None else experts
    if shared_by > 1:
        experts = world.broadcast_object(experts, "the agreement on seeds", group)
    return gate, experts
