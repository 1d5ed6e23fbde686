"""Built-in and custom experts. R rows sorted by expert, e local experts, D model_dim, H hidden_dim."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fairseq_tutel import kernels
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.build import draw, draw_linear, hashed_seed, load_class, seeded_generator
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.moe.expert_ffn import FFNCall, RowMaps, ffn
from fairseq_tutel.moe.expert_stack import OWN, ExpertStack, Tensors, Weights
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.option import is_custom, require
from fairseq_tutel.parallel.groups import Part


class Experts(ExpertStack):
    """Built-in experts of the types `ffn` (two linear layers) and `glu` (SwiGLU).

    The parameters are fc1_weight [e, H, D], fc1_bias [e, H], fc2_weight [e, D, H] and fc2_bias [e, D]. The
    type `glu` adds fc3_weight [e, H, D] and fc3_bias [e, H].
    """

    slice_dims: ClassVar[dict[str, int]] = {
        **dict.fromkeys(("fc1_weight", "fc1_bias", "fc3_weight", "fc3_bias", "fc2_bias"), 1),
        "fc2_weight": 2,
    }
    added: ClassVar[tuple[str, ...]] = ("fc2_bias",)
    takes_quantized: ClassVar[bool] = True

    def __init__(self, config: MoEConfig, part: Part | None = None, device: str | None = None) -> None:
        super().__init__(config, part)
        slices = self.part.slices
        hidden_dim = _part_of(config.hidden_dim, slices, "hidden_dim")
        # Only the tensor fc2_bias is split in model_dim.
        model_dim = _part_of(config.model_dim, slices, "model_dim") if config.expert_bias else 0
        shapes = {"fc1": (hidden_dim, hidden_dim, config.model_dim)}
        if config.expert_type == "glu":
            shapes["fc3"] = (hidden_dim, hidden_dim, config.model_dim)
        shapes["fc2"] = (model_dim, config.model_dim, hidden_dim)
        for name, (bias_dim, out_dim, in_dim) in shapes.items():
            weight = torch.empty(self.num_local, out_dim, in_dim, device=device)
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))
            bias = torch.empty(self.num_local, bias_dim, device=device)
            self.register_parameter(f"{name}_bias", nn.Parameter(bias) if config.expert_bias else None)
        # All experts share one layer norm (fairseq's --scale-fc), which every rank holds.
        self.hidden_layer_norm = nn.LayerNorm(config.hidden_dim) if config.hidden_layer_norm else None

    @torch.no_grad()
    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialize each expert as nn.Linear does, or with a normal distribution if `init_std` is set."""
        for tensor, parameter in self.expert_parameters().items():
            if parameter.is_meta:
                continue
            map_name, kind = tensor.split("_")
            fan_in = self.whole_shape(f"{map_name}_weight")[1]
            for i in range(self.num_local):
                generator = seeded_generator(seed, name, self.first + i, tensor)
                # Complete experts are drawn, so that the values do not depend on the number of ranks.
                whole = parameter.new_empty(self.whole_shape(tensor))
                draw_linear(whole, fan_in, kind, self.config.init_std, generator)
                parameter[i].copy_(self.own_part(tensor, whole.unsqueeze(0))[0])

    def prepared(self, tensors: Tensors, device: torch.device) -> Tensors:
        """Return the expert weights in autocast's dtype if autocast is enabled, otherwise unchanged."""
        if not torch.is_autocast_enabled(device.type):
            return tensors
        dtype = torch.get_autocast_dtype(device.type)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run each expert, or its shard on this rank, on the expert's group of rows."""
        tensors = self.prepared(tensors, rows_RD.device)
        rows_RD = rows_RD.to(tensors["fc1_weight"].dtype)
        if not self.is_one_node:
            return self._by_parts(rows_RD, groups, tensors)
        return ffn(rows_RD, tensors, self._call(groups, rows_RD.device, rows_RD.dtype))

    def run_fused(self, x_TD: Tensor, routing: Routing, weights: Weights = OWN) -> Tensor:
        """Dispatch, run the experts and combine, as one autograd node; return each token's weighted sum."""
        maps = routing.weights_TK, routing.row_of_TK, routing.source_of_R, routing.token_of_R
        return self._by_maps(x_TD, routing.groups, maps, weights)

    def run_unsorted(
        self,
        rows_RD: Tensor,
        groups: Groups,
        to_expert_R: Tensor,
        to_row_R: Tensor,
        weights: Weights = OWN,
    ) -> Tensor:
        """Run the experts on rows in any order. Experts that can be fused read the rows without sorting."""
        if not self.can_fuse:
            return super().run_unsorted(rows_RD, groups, to_expert_R, to_row_R, weights)
        maps = None, to_row_R.unsqueeze(1), to_expert_R, to_expert_R
        return self._by_maps(rows_RD, groups, maps, weights)

    def _by_maps(self, x_TD: Tensor, groups: Groups, maps: RowMaps, weights: Weights) -> Tensor:
        tensors, groups = weights.of_groups(self, groups)
        tensors = self.prepared(tensors, x_TD.device)
        dtype = tensors["fc1_weight"].dtype
        return ffn(x_TD.to(dtype), tensors, self._call(groups, x_TD.device, dtype), maps)

    @property
    def is_one_node(self) -> bool:
        """Whether one autograd node can compute all experts.

        The node supports only an activation between fc1 and fc2, and calls no method of a subclass.
        """
        own, drops = type(self), self.training and self.config.activation_dropout > 0
        is_replaced = own.run is not Experts.run or own.activate is not Experts.activate
        is_replaced = is_replaced or own.forward is not ExpertStack.forward
        return self.hidden_layer_norm is None and not drops and not is_replaced

    def _call(self, groups: Groups, device: torch.device, dtype: torch.dtype) -> FFNCall:
        config = self.config
        return FFNCall(
            ops=kernels.ops(config.backend, device, dtype, config.fp32_products),
            groups=groups,
            activation=config.activation,
            recompute=config.recompute_experts,
        )

    def _by_parts(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        def linear(name: str, rows: Tensor) -> Tensor:
            weight, bias = tensors[f"{name}_weight"], tensors.get(f"{name}_bias")
            config = self.config
            return grouped_linear(rows, groups, weight, bias, config.backend, config.fp32_products)

        norm = self.hidden_layer_norm
        return feed_forward(rows_RD, linear, self.config, self.activate, norm, self.training)

    def activate(self, hidden_RH: Tensor) -> Tensor:
        """Apply the activation to fc1's output; `glu` experts then multiply the result by fc3's output."""
        return activation_of(self.config)(hidden_RH)


def feed_forward(
    x: Tensor,
    linear: Callable[[str, Tensor], Tensor],
    config: MoEConfig,
    activate: Callable[[Tensor], Tensor],
    norm: nn.Module | None,
    training: bool,
) -> Tensor:
    """Compute an expert's FFN of x [..., D]; `linear` applies a linear layer by its name, such as fc1."""
    hidden = activate(linear("fc1", x))
    if config.expert_type == "glu":
        hidden = hidden * linear("fc3", x)
    hidden = F.dropout(hidden, config.activation_dropout, training)
    if norm is not None:
        hidden = norm(hidden)
    return linear("fc2", hidden)


def activation_of(config: MoEConfig) -> Callable[[Tensor], Tensor]:
    """Return the activation function that `config.activation` names; `glu` experts use silu."""
    return F.silu if config.expert_type == "glu" else ACTIVATIONS[config.activation].forward


class CustomExperts(ExpertStack):
    """Experts of a custom class: `kind(config)` returns one expert, which maps rows [n, D] to rows [n, D].

    Parameters are stacked by expert under their own names, in which a dot becomes __. Parameters are
    exchanged, saved and loaded like those of built-in experts. The class's constructor initializes each
    expert, with a different seed.
    """

    def __init__(
        self, config: MoEConfig, kind: type, part: Part | None = None, device: str | None = None
    ) -> None:
        super().__init__(config, part)
        self.kind = kind
        with torch.device("meta"):
            template = kind(config)
        name = f"expert {kind.__name__}"
        require(bool(list(template.parameters())), f"{name} has no parameters; give a torch module.")
        require(
            not list(template.buffers()),
            f"{name} has buffers, which all experts would share; make them parameters or class constants.",
        )
        # Keeping the module in a list hides the module from nn.Module, so its parameters are not registered
        # twice. Only the forward method of the hidden module is used.
        self._template = [template]
        for name, parameter in template.named_parameters():
            shape = (self.num_local, *parameter.shape)
            values = torch.empty(shape, dtype=parameter.dtype, device=device)
            stacked = nn.Parameter(values, requires_grad=parameter.requires_grad)
            self.register_parameter(_key(name), stacked)

    @torch.no_grad()
    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialize each expert by calling its class's constructor with a different seed."""
        stacks = self.expert_parameters()
        if any(stack.is_meta for stack in stacks.values()):
            return
        for i in range(self.num_local):
            own_seed = hashed_seed(seed, name, self.first + i, "expert")
            expert = draw(self.kind, self.config, own_seed)
            for tensor, parameter in expert.named_parameters():
                stacks[_key(tensor)][i].copy_(parameter)

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run each expert on its group of rows; an expert without rows is not called."""
        (template,) = self._template
        template.train(self.training)
        counts = list(groups.host)
        rows_RD = rows_RD[: sum(counts)]
        # The backward of `unbind` makes one gradient for the stack. Indexing would make a zero-filled
        # gradient of the complete stack for every expert.
        stacks = {name: tensors[_key(name)].unbind(0) for name, _ in template.named_parameters()}

        def run(i: int, rows: Tensor) -> Tensor:
            return functional_call(template, {name: s[i] for name, s in stacks.items()}, (rows,))

        parts = rows_RD.split(counts)
        done = [run(i, rows_i) for i, rows_i in enumerate(parts) if len(rows_i)]
        # Without rows, one call with zero rows gives the output's dtype and width, and gradients of zero.
        out = torch.cat(done) if done else run(0, rows_RD)
        if out.shape != rows_RD.shape:
            raise ValueError(
                f"expert_type (--moe-expert-type) {self.kind.__name__} returns {tuple(out.shape)} for rows "
                f"of shape {tuple(rows_RD.shape)}; return the shape of the input."
            )
        return out


def _key(name: str) -> str:
    return name.replace(".", "__")


def _part_of(width: int, slices: int, name: str) -> int:
    require(
        width % slices == 0,
        f"{label_of(name)} is {width}, but --moe-expert-parallel-size splits experts into {slices} shards; "
        "give a multiple of that number, or a smaller expert-parallel size.",
    )
    return width // slices


def build_experts(config: MoEConfig, part: Part, device: str | None = None) -> ExpertStack:
    """Build this rank's experts of the configured type, built-in or custom."""
    if is_custom(config.expert_type):
        kind = load_class(config.expert_type)
        return CustomExperts(config, kind, part, device)
    return Experts(config, part, device)


def grouped_linear(
    rows: Tensor,
    groups: Groups,
    weight: Tensor,
    bias: Tensor | None = None,
    backend: str = "auto",
    fp32_products: str = "torch",
) -> Tensor:
    """Apply each expert's linear map to its rows: rows[r] @ weight[i].T + bias[i] for r in group i.

    Output rows after the last group are 0. The shapes are rows [R, I], weight [e, O, I] and bias [e, O].
    The result [R, O] has the dtype of weight.
    """
    rows = rows.to(weight.dtype)
    ops = kernels.ops(backend, rows.device, rows.dtype, fp32_products)
    if not torch.is_grad_enabled():  # without gradients, `weight` may be an ExpertTensorList
        return ops.grouped_linear(rows, weight, bias, groups)
    return _GroupedLinear.apply(rows, weight, bias, groups, ops)


class _GroupedLinear(torch.autograd.Function):
    """One autograd node for all experts. Separate nodes would each make a gradient of the full stack."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, ops: Any
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups, ctx.ops, ctx.has_bias = groups, ops, bias is not None
        return ops.grouped_linear(rows, weight, bias, groups)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), groups, ops = ctx.saved_tensors, ctx.groups, ctx.ops
        dout = dout.contiguous()
        drows = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            drows = ops.grouped_linear(dout, weight.mT, None, groups)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dweight, dbias = ops.grouped_weight_grad(dout, rows, groups, bias=ctx.has_bias)
        return drows, dweight, dbias, None, None
