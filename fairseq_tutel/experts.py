"""Experts: (rows, counts) -> rows. Stacked weights, one grouped linear map per projection.

R rows, D model_dim, H hidden_dim, e local experts. Rows are expert-major: expert i owns the next
counts[i] rows.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq_tutel.config import MoEConfig


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


class Experts(nn.Module):
    """The local slice of a layer's experts: `ffn` or `glu`, weights stacked on dimension 0.

    Parameters: fc1_weight [e, H, D], fc1_bias [e, H], fc2_weight [e, D, H], fc2_bias [e, D]; glu adds
    fc3_weight [e, H, D], fc3_bias [e, H]. Each expert's matrices have nn.Linear's layout.

    A state dict holds all E experts by global id: `load_state_dict` takes the local slice out of it,
    and `state_dict` gives the whole after `comm.checkpoint` gathered it, else the local slice.
    """

    def __init__(self, config: MoEConfig, num_local: int | None = None, first: int = 0) -> None:
        super().__init__()
        self.config = config
        self.num_local = config.num_experts if num_local is None else num_local
        self.first = first
        shapes = {"fc1": (config.hidden_dim, config.model_dim)}
        if config.expert_type == "glu":
            shapes["fc3"] = (config.hidden_dim, config.model_dim)
        shapes["fc2"] = (config.model_dim, config.hidden_dim)
        for name, (out_dim, in_dim) in shapes.items():
            weight = nn.Parameter(torch.empty(self.num_local, out_dim, in_dim))
            self.register_parameter(f"{name}_weight", weight)
            bias = (
                nn.Parameter(torch.empty(self.num_local, out_dim)) if config.expert_bias else None
            )
            self.register_parameter(f"{name}_bias", bias)
        # One layer norm for all experts (fairseq's --scale-fc): an ordinary, replicated module.
        self.hidden_layer_norm = (
            nn.LayerNorm(config.hidden_dim) if config.hidden_layer_norm else None
        )
        self.gathered: dict[str, Tensor] | None = None
        self.everywhere: dict[str, Tensor] | None = None

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters by name, without the layer norm that all experts share."""
        return dict(self.named_parameters(recurse=False))

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw every expert as nn.Linear does, or normal by `init_std`, from a generator of its own.

        The generator's seed is a hash of (seed, name, global expert id, tensor), so a model has the
        same experts for every number of ranks, and layers differ from each other.
        """
        for tensor, parameter in self.expert_parameters().items():
            if parameter.is_meta:
                continue
            fan_in = getattr(self, tensor.split("_")[0] + "_weight").shape[2]
            bound = 1 / math.sqrt(fan_in)
            for i in range(self.num_local):
                generator = seeded_generator(seed, name, self.first + i, tensor)
                values = torch.zeros(parameter.shape[1:])
                if self.config.init_std == 0:
                    nn.init.uniform_(values, -bound, bound, generator=generator)
                elif tensor.endswith("weight"):
                    nn.init.normal_(values, std=self.config.init_std, generator=generator)
                parameter.data[i].copy_(values)

    def forward(self, rows_RD: Tensor, counts: Sequence[int]) -> Tensor:
        """Run expert i on its counts[i] rows; `counts` is on the host and sums to R."""
        hidden_RH = self._linear("fc1", rows_RD, counts)
        if self.config.expert_type == "glu":
            hidden_RH = F.silu(hidden_RH) * self._linear("fc3", rows_RD, counts)
        else:
            hidden_RH = ACTIVATION_FNS[self.config.activation](hidden_RH)
        hidden_RH = F.dropout(hidden_RH, self.config.activation_dropout, self.training)
        if self.hidden_layer_norm is not None:
            hidden_RH = self.hidden_layer_norm(hidden_RH)
        return self._linear("fc2", hidden_RH, counts)

    def _linear(self, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        tensors = self.everywhere or self.expert_parameters()
        return grouped_linear(rows, counts, tensors[f"{name}_weight"], tensors.get(f"{name}_bias"))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in (self.gathered or {}).items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, parameter in self.expert_parameters().items():
            tensor = state_dict.get(prefix + name)
            if tensor is not None:
                state_dict[prefix + name] = self._local_slice(prefix + name, tensor, parameter)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _local_slice(self, key: str, tensor: Tensor, parameter: Tensor) -> Tensor:
        expected = (self.config.num_experts, *parameter.shape[1:])
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"the checkpoint's {key} has shape {tuple(tensor.shape)} but this model needs "
                f"{expected}; give the --moe-expert-count and --moe-expert-ffn-dim it was saved with "
                "(a first number below the expert count is a crash file that holds one rank's part)."
            )
        return tensor[self.first : self.first + self.num_local]


def seeded_generator(seed: int, name: str, expert: int, tensor: str) -> torch.Generator:
    """Return a CPU generator seeded by a hash of its arguments."""
    digest = hashlib.sha256(f"{seed}/{name}/{expert}/{tensor}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


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
