"""A MoE layer with Tutel's arguments. The page docs/tutel.md lists the arguments and the differences.

Letters: D (model_dim), H (hidden_dim), E (experts), e (experts on this rank), s (ranks per expert).
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.adaptive import nearest_degree
from fairseq_tutel.moe.build import draw, hashed_seed
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors
from fairseq_tutel.moe.experts import Experts, build_experts
from fairseq_tutel.moe.gates import build_gate
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.option import is_whole, require
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.groups import Part, Topology, make_topology, topology_within
from fairseq_tutel.parallel.rendezvous import ranks_per_node
from fairseq_tutel.parallel.strategy import Strategy, degree_of

logger = logging.getLogger(__name__)

GATES = {"top": "linear", "cosine_top": "cosine"}
# This table maps each key of Tutel's gate dict to a field of MoEConfig and Tutel's default value.
GATE_KEYS: dict[str, tuple[str, Any]] = {
    "k": ("top_k", 1),
    "capacity_factor": ("capacity_factor", 1.0),
    "gate_noise": ("gate_noise", 0.0),
    "fp32_gate": ("gate_fp32", False),
    "proj_dim": ("gate_projection_dim", 256),
    "init_t": ("gate_temperature", 0.5),
}
COUNTS = ("num_experts_per_device", "count_per_node")  # The second key is an older name of the first.
FFN_KEYS = ("hidden_size_per_expert", "activation_fn", "has_fc1_bias", "has_fc2_bias")
EXPERT_KEYS = {"ffn": (*FFN_KEYS, *COUNTS), "llama_ffn": (*FFN_KEYS[:2], *COUNTS)}


class TutelMoELayer(nn.Module):
    """A MoELayer with Tutel's arguments for the constructor and for calls; docs/tutel.md explains both.

    Args:
        gate_type: the gate, such as {"type": "top", "k": 2, "capacity_factor": 1.25}, or a list of gates.
        model_dim: the width of a token.
        experts: the experts, such as {"type": "ffn", "num_experts_per_device": 4,
            "hidden_size_per_expert": 256}.

    Raises:
        ValueError: a dict has an unknown key or an invalid value.

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
    ) -> None:
        super().__init__()
        self.result_func = result_func
        _check("experts", experts, EXPERT_KEYS)
        per_device = next((experts[name] for name in COUNTS if name in experts), 1)
        self.num_global_experts = self.global_expert_count(per_device, group)
        self.sharded_count = max(1, world.size(group) // self.num_global_experts)
        fields = {
            **_expert_fields(experts, model_dim),
            "model_dim": model_dim,
            "num_experts": self.num_global_experts,
            "prescore": not is_postscore,
            "drop_policy": "bpr" if batch_prioritized_routing else "position",
            "normalize_gate": "before" if normalize_gate else "none",
            "balance_loss": "gshard" if is_gshard_loss else "load_importance_tutel",
        }
        seed, _, seed_after = (*(seeds or ()), None, None, None)[:3]
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        configs: list[MoEConfig] = []
        gates: list[nn.Module] = []
        for gate in gate_type if isinstance(gate_type, list | tuple) else [gate_type]:
            module = _custom_gate(gate, model_dim, self.num_global_experts, seed + len(gates))
            configs.append(MoEConfig(**fields, **_gate_fields(gate, module, self.num_global_experts)))
            gates.append(build_gate(configs[-1], configs[-1].gate_type) if module is None else module)
        topology = self._topology(experts, model_dim, group, use_2dh)
        built = _build_experts(experts, configs[0], topology, group, seed)
        self.moe = MoELayer(
            configs[0], topology, seed=seed, gate_configs=configs, gates=gates, experts=built
        )
        self.moe.follow(Strategy(algorithm="2dh" if use_2dh else "linear"))
        degree = degree_of(parallel_type, self.sharded_count)
        require(
            degree is not None,
            f"parallel_type is {parallel_type!r}; choose one of adaptive:r (r a whole number), data, "
            "model, auto.",
        )
        self._follow(a2a_ffn_overlap_degree, degree)
        if topology.num_replicas > 1:
            logger.warning(
                "%d ranks hold a replica of each expert; outside of fairseq, reduce their gradients with "
                "fairseq_tutel.parallel.gradients.reduce_expert_gradients, as in docs/tutel.md: otherwise "
                "the replicas diverge.",
                topology.num_replicas,
            )
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
        *,
        adaptive_r: int | None = None,
        inequivalent_tokens: bool = False,
    ) -> Any:
        """Route every token of the input [..., D] through its experts.

        Return `result_func(y)`, or y in the dtype of the input without a `result_func`. `y.l_aux` is the
        balance loss, a scalar with gradient. As in Tutel, `a2a_ffn_overlap_degree` and `adaptive_r` also
        apply to later calls. `inequivalent_tokens` has no effect, because ranks may always have different
        numbers of tokens.
        """
        self._follow(a2a_ffn_overlap_degree, adaptive_r)
        x = input if torch.is_autocast_enabled(input.device.type) else input.to(self.experts.dtype)
        top_k = None if top_k is None else min(top_k, self.num_global_experts)
        y, output = self.moe(x, capacity_factor=capacity_factor, top_k=top_k, gate_index=gate_index)
        y = y.to(input.dtype)
        y.l_aux = output.balance_loss
        return y if self.result_func is None else self.result_func(y)

    def _follow(self, overlap: int | None, degree: int | None) -> None:
        """From now on, use this overlap degree, and the largest valid adaptive_r up to `degree`."""
        strategy = self.moe.strategy
        if overlap is not None:
            strategy = dataclasses.replace(strategy, overlap=overlap)
        if degree is not None:
            # If experts are not split into shards, each rank already has its complete expert. Every
            # adaptive_r above 0 therefore has the same effect as 1.
            degree = nearest_degree(max(degree, 0), self.experts.part.slices)
            strategy = dataclasses.replace(strategy, adaptive_r=degree)
        if strategy != self.moe.strategy:
            self.moe.follow(strategy)

    def _topology(
        self, experts: Mapping[str, Any], model_dim: int, group: dist.ProcessGroup | None, use_2dh: bool
    ) -> Topology:
        """Return the topology. Experts are split if the number of ranks per expert divides their widths."""
        widths = [experts.get("hidden_size_per_expert", 0), *[model_dim] * (experts["type"] == "ffn")]
        shared = self.sharded_count > 1 and experts["type"] in EXPERT_KEYS
        sliced = shared and not any(width % self.sharded_count for width in widths)
        if group is not None:
            return topology_within(group, self.num_global_experts, sliced)
        counts, per_node = [self.num_global_experts], ranks_per_node() if use_2dh else 0
        return make_topology(counts, world.size() if sliced else 0, per_node)

    @property
    def experts(self) -> ExpertStack:
        """The module of this rank's experts."""
        return self.moe.experts

    @property
    def gates(self) -> list[nn.Module]:
        """The list of gates, which `gate_index` indexes."""
        return [self.moe.gate, *self.moe.other_gates]

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs of the gates ('gate') or the local experts ('local_experts')."""
        modules = {"gate": nn.ModuleList(self.gates), "local_experts": self.experts}
        return modules[param_type].named_parameters()

    @staticmethod
    def global_expert_count(num_local_experts: float, group: dist.ProcessGroup | None = None) -> int:
        """Return E, the number of experts on all ranks of a group, from `num_experts_per_device`.

        A value n > 0 means n experts on each rank; -n or 1/n means one expert that n ranks share.
        """
        count, ranks = num_local_experts, world.size(group)
        if isinstance(count, float) and 0 < count < 1:
            count = -round(1 / count)
        require(
            is_whole(count) and count != 0 and (count > 0 or ranks % count == 0),
            f"num_experts_per_device is {num_local_experts!r} on {ranks} ranks; give n experts on each "
            f"rank, or -n or 1/n for one expert on every n ranks, where n divides {ranks}.",
        )
        return int(count * ranks if count > 0 else ranks // -count)


moe_layer = TutelMoELayer


class FFNExperts(Experts):
    """FFN experts with a custom activation, or with only one of the two biases."""

    def __init__(self, config: MoEConfig, part: Part, options: Mapping[str, Any]) -> None:
        super().__init__(config, part)
        default = F.silu if config.expert_type == "glu" else F.relu
        self.activation = options.get("activation_fn") or default
        for name in ("fc1_bias", "fc2_bias"):
            if not options.get(f"has_{name}", True):
                setattr(self, name, None)

    @property
    def is_one_node(self) -> bool:
        """False, because one autograd node cannot compute an FFN with a custom activation."""
        return False

    def activate(self, hidden_RH: Tensor) -> Tensor:
        """Apply the custom activation to the rows of all local experts."""
        return self.activation(hidden_RH)


class ModuleExperts(ExpertStack):
    """A custom module for all local experts, which maps x [e, rows, D] and a context to rows of any width.

    The rows of each expert are padded with zeros to the largest number of rows of an expert, at least 1.
    Parameters keep their names, except that dots become __.
    """

    def __init__(self, config: MoEConfig, part: Part, module: nn.Module, context: Any) -> None:
        super().__init__(config, part)
        self.context = context
        # The list hides the module from nn.Module, so that its parameters are registered only once, below.
        self._module = [module]
        for name, parameter in module.named_parameters():
            require(
                parameter.shape[:1] == (part.num_local,),
                f"expert {type(module).__name__} has the parameter {name} of shape "
                f"{tuple(parameter.shape)}; its dimension 0 must be {part.num_local}, the number of local "
                "experts.",
            )
            self.register_parameter(_key(name), parameter)
        for name, buffer in module.named_buffers():
            self.register_buffer(_key(name), buffer)

    def reset_parameters(self, seed: int, name: str) -> None:
        """Do nothing, because the module's constructor has already initialized the weights."""

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run the custom module once on the rows of all local experts."""
        (module,) = self._module
        module.train(self.training)
        counts = list(groups.host)
        x_eND = pad_sequence(list(rows_RD[: sum(counts)].split(counts)), batch_first=True)
        if x_eND.shape[1] == 0:  # A row of padding keeps parameters in the autograd graph.
            x_eND = F.pad(x_eND, (0, 0, 0, 1))
        own = {**dict(self.named_buffers()), **tensors}
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        y = functional_call(module, {name: own[_key(name)] for name in names}, (x_eND, self.context))
        return torch.cat([rows[:count] for rows, count in zip(y, counts, strict=True)])


def _key(name: str) -> str:
    return name.replace(".", "__")


def _check(name: str, options: Any, keys: Mapping[str, Iterable[str]]) -> None:
    """Raise ValueError if a dict has an unknown type, or a key that its type does not allow."""
    kind = options.get("type", "") if isinstance(options, Mapping) else ""
    require(
        kind in (*keys, "custom"),
        f"{name} has {options!r}; give a dict with a type of {', '.join(keys)} or custom.",
    )
    for key in options if kind != "custom" else ():
        known = ("type", *keys[kind])
        require(key in known, f"{name} has the unknown key {key!r}; choose from {', '.join(known)}.")


def _expert_fields(experts: Mapping[str, Any], model_dim: int) -> dict[str, Any]:
    """Return the MoEConfig fields that the `experts` dict sets."""
    if experts["type"] == "custom":
        return {"hidden_dim": model_dim}  # MoEConfig needs a hidden_dim, even if unused.
    fields = {"hidden_dim": experts.get("hidden_size_per_expert"), "activation": "relu"}
    if experts["type"] == "llama_ffn":  # Weights are initialized as in Tutel.
        return {**fields, "expert_type": "glu", "expert_bias": False, "init_std": 0.01}
    biases = [experts.get(name, True) for name in ("has_fc1_bias", "has_fc2_bias")]
    return {**fields, "expert_bias": any(biases)}


def _build_experts(
    experts: Mapping[str, Any], config: MoEConfig, topology: Topology, group: Any, seed: int
) -> ExpertStack:
    """Build this rank's experts; `seed` and the first expert's global ID seed a custom module's weights."""
    part = topology.part(config.num_experts)
    if experts["type"] == "custom":
        sizes = {"model_dim": config.model_dim, "sharded_count": 1}
        rest = {key: value for key, value in experts.items() if key not in ("type", "module", *COUNTS)}
        options = {"num_experts_per_device": part.num_local, **sizes, **rest}
        own_seed = hashed_seed(seed, "", part.first, "experts")
        context = SimpleNamespace(
            **sizes, num_global_experts=config.num_experts, num_local_experts=part.num_local,
            world_size=topology.world_size, group=group, adaptive_degree=1, megablocks_size=0,
        )  # fmt: skip
        module = draw(lambda given: experts["module"](**given), options, own_seed)
        return ModuleExperts(config, part, module, context)
    one_bias = experts.get("has_fc1_bias", True) != experts.get("has_fc2_bias", True)
    if experts.get("activation_fn") or one_bias:
        return FFNExperts(config, part, experts)
    return build_experts(config, part)


def _custom_gate(gate: Any, model_dim: int, num_experts: int, seed: int) -> nn.Module | None:
    """Build and return the module of a custom gate; return None for a built-in gate."""
    _check("gate_type", gate, dict.fromkeys(GATES, GATE_KEYS))
    if gate["type"] != "custom":
        return None
    rest = {key: value for key, value in gate.items() if key not in ("type", "module")}
    options = {"model_dim": model_dim, "num_global_experts": num_experts, **rest}
    return draw(lambda given: gate["module"](**given), options, hashed_seed(seed, "", -1, "gate"))


def _gate_fields(gate: Any, module: nn.Module | None, num_experts: int) -> dict[str, Any]:
    """Return the MoEConfig fields that a gate dict sets; a custom gate's `top_k` attribute overrides k."""
    values = {field: gate.get(key, default) for key, (field, default) in GATE_KEYS.items()}
    return {
        **values,
        "gate_type": GATES.get(gate["type"], "linear"),
        "gate_fp32": bool(values["gate_fp32"]),
        "top_k": min(getattr(module, "top_k", values["top_k"]), num_experts),  # as in Tutel
        "eval_capacity_factor": values["capacity_factor"],
    }
