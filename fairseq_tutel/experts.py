"""Experts: (rows, counts) -> rows. Stacked weights, one grouped linear map per projection.

R rows, D model_dim, H hidden_dim, e local experts. Rows are expert-major: expert i owns the next
counts[i] rows.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_tutel.comm.slices import Part
from fairseq_tutel.config import MoEConfig, label_of
from fairseq_tutel.custom import is_custom, load_class
from fairseq_tutel.custom_experts import CustomExperts
from fairseq_tutel.expert_stack import ExpertStack, Tensors
from fairseq_tutel.initial import draw_linear, seeded_generator


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _identity(x: Tensor) -> Tensor:
    return x


# fairseq's names; its gelu_fast is its gelu_accurate, the tanh form. In-place where autograd allows.
ACTIVATION_FNS = {
    "relu": F.relu_,
    "relu_squared": _relu_squared,
    "gelu": F.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "tanh": torch.tanh_,
    "linear": _identity,
    "swish": F.silu,
}


class Experts(ExpertStack):
    """Two kinds: `ffn` and `glu`.

    Parameters: fc1_weight [e, H, D], fc1_bias [e, H], fc2_weight [e, D, H], fc2_bias [e, D]; glu adds
    fc3_weight [e, H, D], fc3_bias [e, H]. Each expert's matrices have nn.Linear's layout.
    """

    slice_dims: ClassVar[dict[str, int]] = {
        **dict.fromkeys(("fc1_weight", "fc1_bias", "fc3_weight", "fc3_bias", "fc2_bias"), 1),
        "fc2_weight": 2,
    }
    added: ClassVar[tuple[str, ...]] = ("fc2_bias",)

    def __init__(self, config: MoEConfig, part: Part | None = None) -> None:
        super().__init__(config, part)
        slices = self.part.slices
        hidden_dim = _part_of(config.hidden_dim, slices, "hidden_dim")
        # Of the output only the bias is cut.
        model_dim = _part_of(config.model_dim, slices, "model_dim") if config.expert_bias else 0
        shapes = {"fc1": (hidden_dim, hidden_dim, config.model_dim)}
        if config.expert_type == "glu":
            shapes["fc3"] = (hidden_dim, hidden_dim, config.model_dim)
        shapes["fc2"] = (model_dim, config.model_dim, hidden_dim)
        for name, (bias_dim, out_dim, in_dim) in shapes.items():
            weight = nn.Parameter(torch.empty(self.num_local, out_dim, in_dim))
            self.register_parameter(f"{name}_weight", weight)
            bias = (
                nn.Parameter(torch.empty(self.num_local, bias_dim)) if config.expert_bias else None
            )
            self.register_parameter(f"{name}_bias", bias)
        # One layer norm for all experts (fairseq's --scale-fc): an ordinary, replicated module.
        self.hidden_layer_norm = (
            nn.LayerNorm(config.hidden_dim) if config.hidden_layer_norm else None
        )

    @torch.no_grad()
    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw every expert as nn.Linear does, or normal by `init_std`.

        The generator's seed is a hash of (seed, name, global expert id, tensor), so a model has the
        same experts for every number of ranks, and layers differ from each other.
        """
        for tensor, parameter in self.expert_parameters().items():
            if parameter.is_meta:
                continue
            map_name, kind = tensor.split("_")
            fan_in = self.whole_shape(f"{map_name}_weight")[1]
            for i in range(self.num_local):
                generator = seeded_generator(seed, name, self.first + i, tensor)
                # A part of what is drawn for the whole, so that a model is the same for every P.
                whole = parameter.new_empty(self.whole_shape(tensor))
                draw_linear(whole, fan_in, kind, self.config.init_std, generator)
                parameter[i].copy_(self.own_part(tensor, whole.unsqueeze(0))[0])

    def prepared(self, tensors: Tensors, device: torch.device) -> Tensors:
        """Return the tensors in autocast's dtype, where that is on."""
        if not torch.is_autocast_enabled(device.type):
            return tensors
        dtype = torch.get_autocast_dtype(device.type)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def forward(
        self, rows_RD: Tensor, counts: Sequence[int], tensors: Tensors | None = None
    ) -> Tensor:
        """Run expert i on its counts[i] rows, with its hidden dimension or a part of it."""
        tensors = self.tensors() if tensors is None else tensors
        hidden_RH = apply_map("fc1", rows_RD, counts, tensors)
        if self.config.expert_type == "glu":
            hidden_RH = F.silu(hidden_RH) * apply_map("fc3", rows_RD, counts, tensors)
        else:
            hidden_RH = ACTIVATION_FNS[self.config.activation](hidden_RH)
        hidden_RH = F.dropout(hidden_RH, self.config.activation_dropout, self.training)
        if self.hidden_layer_norm is not None:
            hidden_RH = self.hidden_layer_norm(hidden_RH)
        return apply_map("fc2", hidden_RH, counts, tensors)


def _part_of(width: int, slices: int, name: str) -> int:
    if width % slices:
        raise ValueError(
            f"{label_of(name)} is {width}, which --moe-expert-parallel-size would cut into {slices} slices "
            "of an expert; give a multiple of that, or a smaller size."
        )
    return width // slices


def build_experts(config: MoEConfig, part: Part) -> ExpertStack:
    """Return the local experts that `config.expert_type` names, ours or of the user's class."""
    if is_custom(config.expert_type):
        kind = load_class(label_of("expert_type"), config.expert_type)
        return CustomExperts(config, kind, part)
    return Experts(config, part)


def apply_map(name: str, rows: Tensor, counts: Sequence[int], tensors: Tensors) -> Tensor:
    """Apply the named map of every expert to its rows."""
    return grouped_linear(rows, counts, tensors[f"{name}_weight"], tensors.get(f"{name}_bias"))


def grouped_linear(
    rows: Tensor, counts: Sequence[int], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return rows[r] @ weight[i].T + bias[i] for the rows r of group i.

    Args:
        rows: [R, I].
        counts: e host ints that sum to R.
        weight: [e, O, I].
        bias: [e, O] or None.

    Returns:
        [R, O] in rows' dtype, or in autocast's.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _GroupedLinear.apply(rows, weight, bias, tuple(counts))


class _GroupedLinear(torch.autograd.Function):
    """One autograd node for all groups.

    Autograd over `weight[i]` would build a zero-filled full stack per expert; here each product is
    written straight into its slice of the output or the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts, ctx.has_bias = counts, bias is not None
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        groups = zip(out.split(counts), rows.split(counts), weight.mT, strict=True)
        for i, (out_i, rows_i, weight_i) in enumerate(groups):
            if bias is None:
                torch.mm(rows_i, weight_i, out=out_i)
            else:
                torch.addmm(bias[i], rows_i, weight_i, out=out_i)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        dout = dout.contiguous()
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        drows = torch.empty_like(rows) if needs_rows else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dbias = dout.new_empty(weight.shape[:2]) if ctx.has_bias and needs_bias else None
        parts = dout.split(ctx.counts)
        if drows is not None:
            for out_i, dout_i, weight_i in zip(drows.split(ctx.counts), parts, weight, strict=True):
                torch.mm(dout_i, weight_i, out=out_i)
        if dweight is not None:
            for out_i, dout_i, rows_i in zip(dweight, parts, rows.split(ctx.counts), strict=True):
                torch.mm(dout_i.t(), rows_i, out=out_i)
        if dbias is not None:
            for out_i, dout_i in zip(dbias, parts, strict=True):
                torch.sum(dout_i, dim=0, out=out_i)
        return drows, dweight, dbias, None
