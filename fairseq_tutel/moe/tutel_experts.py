"""Build experts from Tutel's `experts` dict: built-in experts, `FFNExperts` or `ModuleExperts`.

R rows, D model_dim, H hidden_dim, O output dimension, e local experts.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.build import hashed_seed
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack, Tensors
from fairseq_tutel.moe.experts import Experts, build_experts
from fairseq_tutel.moe.tutel_arguments import TRUE_OR_FALSE, check, check_keys
from fairseq_tutel.option import AT_LEAST_1, Rule, require
from fairseq_tutel.parallel.groups import Part

COUNTS = ("num_experts_per_device", "count_per_node")  # the second is the older name of the first
FUNCTION: Rule = (lambda v: v is None or callable(v), "give a function of a tensor, or None")
RULES: dict[str, Rule] = {
    "hidden_size_per_expert": AT_LEAST_1,
    "output_dim": (lambda v: v is None or AT_LEAST_1[0](v), "give a whole number, at least 1, or None"),
    "activation_fn": FUNCTION,
    "activation_fn_with_self": FUNCTION,
    "has_fc1_bias": TRUE_OR_FALSE,
    "has_fc2_bias": TRUE_OR_FALSE,
}
BUILT_IN = {"ffn": tuple(RULES), "llama_ffn": ("hidden_size_per_expert", "activation_fn")}
NOT_PASSED = ("type", "module", *COUNTS)


@dataclass(frozen=True, kw_only=True)
class ExpertContext:
    """The second argument of a custom expert module's `forward`, with Tutel's attribute names.

    Custom experts are never sharded.
    """

    model_dim: int
    num_global_experts: int
    num_local_experts: int
    world_size: int
    group: dist.ProcessGroup | None
    sharded_count: int = 1
    adaptive_degree: int = 1
    megablocks_size: int = 0


class FFNExperts(Experts):
    """FFN experts with a custom activation, only one bias, or a different output dimension."""

    def __init__(self, config: MoEConfig, part: Part, options: Mapping[str, Any]) -> None:
        super().__init__(config, part)
        self.activation = options.get("activation_fn")
        self.activation_with_self = options.get("activation_fn_with_self")
        out_dim = options.get("output_dim") or config.model_dim
        hidden_dim = config.hidden_dim // part.slices
        # Attributes that an activation can read in Tutel.
        self.model_dim, self.output_dim = config.model_dim, out_dim
        self.hidden_size_per_expert, self.hidden_size = config.hidden_dim, hidden_dim
        self.num_experts_per_device, self.sharded_count = part.num_local, part.slices
        self.fc2_weight = nn.Parameter(torch.empty(part.num_local, out_dim, hidden_dim))
        if not config.expert_bias:
            return
        self.fc2_bias = nn.Parameter(torch.empty(part.num_local, out_dim // part.slices))
        for name in ("fc1", "fc2"):
            if not options.get(f"has_{name}_bias", True):
                setattr(self, f"{name}_bias", None)

    @property
    def is_one_node(self) -> bool:
        """Whether an FFN is a single autograd node: always False, because of the custom activation."""
        return False

    def activate(self, hidden_RH: Tensor) -> Tensor:
        """Apply the custom activation to the rows of all local experts."""
        if self.activation_with_self is not None:
            return self.activation_with_self(hidden_RH, self)
        return (self.activation or F.relu)(hidden_RH)


class ModuleExperts(ExpertStack):
    """A custom module for all local experts, which maps x [e, rows, D] and a context to [e, rows, O].

    Rows are padded with zeros to the largest row count of an expert, at least 1. Parameters keep their
    names, with __ instead of dots. `build` returns the module with random weights.
    """

    def __init__(
        self, config: MoEConfig, part: Part, build: Callable[[], nn.Module], context: ExpertContext
    ) -> None:
        super().__init__(config, part)
        self.build, self.context = build, context
        self._given: tuple[int, ...] = (config.model_dim,)
        self._returned: tuple[int, ...] = ()
        with drawn_from(0):  # reset_parameters initializes the weights again
            module = build()
        require(
            isinstance(module, nn.Module),
            f"experts' module built {type(module).__name__}; give the class of a torch module.",
        )
        # In a list, so the module is not a submodule: only its forward is used.
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

    @torch.no_grad()
    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialize all local experts with the module's constructor and a seed of this rank."""
        if any(parameter.is_meta for parameter in self.parameters()):
            return
        with drawn_from(hashed_seed(seed, name, self.first, "experts")):
            drawn = self.build()
        for tensor, value in (*drawn.named_parameters(), *drawn.named_buffers()):
            getattr(self, _key(tensor)).copy_(value)

    @contextmanager
    def features(self, shape: tuple[int, ...]) -> Iterator[Callable[[], tuple[int, ...]]]:
        """Context manager that gives the custom module inputs [e, rows, *shape] instead of [e, rows, D].

        It yields a function that returns the dimensions of the output.
        """
        self._given = shape
        try:
            yield lambda: self._returned
        finally:
            self._given = (self.config.model_dim,)

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run the module once on the rows of all local experts."""
        (module,) = self._module
        module.train(self.training)
        counts = list(groups.host)
        rows_RD = rows_RD[: sum(counts)]
        x_eND = pad_sequence(list(rows_RD.split(counts)), batch_first=True)
        if x_eND.shape[1] == 0:  # a row of padding keeps the autograd graph and its collectives
            x_eND = F.pad(x_eND, (0, 0, 0, 1))
        own = {**dict(self.named_buffers()), **tensors}
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        state = {name: own[_key(name)] for name in names}
        y = functional_call(module, state, (x_eND.unflatten(2, self._given), self.context))
        require(
            y.shape[:2] == x_eND.shape[:2],
            f"expert {type(module).__name__} returned shape {tuple(y.shape)} for an input "
            f"of shape {tuple(x_eND.shape)}; keep the first two dimensions, experts and rows.",
        )
        self._returned = tuple(y.shape[2:])
        kept = zip(y.flatten(2).unbind(0), counts, strict=True)
        return torch.cat([rows[:count] for rows, count in kept])


def _key(name: str) -> str:
    return name.replace(".", "__")


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's global random generators within the context, and restore them afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def check_experts(experts: Any, model_dim: int) -> tuple[Any, dict[str, Any]]:
    """Check the `experts` dict; return num_experts_per_device and the MoEConfig fields that it sets."""
    require(
        isinstance(experts, Mapping) and experts.get("type") in (*BUILT_IN, "custom"),
        f"experts is {experts!r}; give a dict with a type of {', '.join(BUILT_IN)} or custom, such as "
        "{'type': 'ffn', 'num_experts_per_device': 2, 'hidden_size_per_expert': 1024}.",
    )
    given = [name for name in COUNTS if name in experts]
    require(len(given) < 2, f"experts has both {' and '.join(COUNTS)}, two names of a key; give only one.")
    per_device = experts[given[0]] if given else 1
    if experts["type"] == "custom":
        require(
            callable(experts.get("module")),
            f"experts' module is {experts.get('module')!r}; give the class of the experts.",
        )
        # MoEConfig needs a hidden dimension, which custom experts do not use.
        return per_device, {"model_dim": model_dim, "hidden_dim": model_dim}
    return per_device, {"model_dim": model_dim, **_built_in_fields(experts)}


def _built_in_fields(experts: Mapping[str, Any]) -> dict[str, Any]:
    kind = experts["type"]
    check_keys(f"experts {kind!r}", experts, ("type", *COUNTS, *BUILT_IN[kind]))
    require(
        "hidden_size_per_expert" in experts,
        "experts has no hidden_size_per_expert; give the hidden dimension of one expert.",
    )
    for key in BUILT_IN[kind]:
        if key in experts:
            check(f"experts' {key}", experts[key], RULES[key])
    require(
        experts.get("activation_fn") is None or experts.get("activation_fn_with_self") is None,
        "experts has both activation_fn and activation_fn_with_self; give one of them.",
    )
    fields = {"hidden_dim": experts["hidden_size_per_expert"], "activation": "relu"}
    if kind == "llama_ffn":  # drawn as in Tutel
        return {**fields, "expert_type": "glu", "expert_bias": False, "init_std": 0.01}
    has_bias = [experts.get(f"has_{name}_bias", True) for name in ("fc1", "fc2")]
    return {**fields, "expert_bias": any(has_bias)}


def can_slice(experts: Mapping[str, Any], model_dim: int, slices: int) -> bool:
    """Return whether an expert of this dict can be split into this number of expert shards."""
    if experts["type"] not in BUILT_IN:
        return False
    widths = [experts["hidden_size_per_expert"]]
    if experts["type"] != "llama_ffn":  # llama_ffn has no output bias to shard
        widths += [model_dim, experts.get("output_dim") or model_dim]
    return not any(width % slices for width in widths)


def build_from_dict(
    experts: Mapping[str, Any], config: MoEConfig, part: Part, context: ExpertContext
) -> ExpertStack:
    """Build the local experts from a dict that `check_experts` has checked."""
    if experts["type"] == "custom":
        build = functools.partial(
            experts["module"],
            model_dim=config.model_dim,
            sharded_count=context.sharded_count,
            num_experts_per_device=part.num_local,
            **{key: value for key, value in experts.items() if key not in NOT_PASSED},
        )
        return ModuleExperts(config, part, build, context)
    ordinary = (
        experts.get("activation_fn") is None
        and experts.get("activation_fn_with_self") is None
        and experts.get("output_dim") in (None, config.model_dim)
        and experts.get("has_fc1_bias", True) == experts.get("has_fc2_bias", True)
    )
    if ordinary:
        return build_experts(config, part)
    return FFNExperts(config, part, experts)
