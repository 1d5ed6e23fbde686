"""Creates arguments for every op of `fairseq_tutel.kernels`, with the op's bytes or operations.

T tokens, D model_dim, H hidden_dim, E experts, K top_k, R = T * K rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups

ACTIVATION = "relu"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes T, D, H, E, K of the dropless layer that calls the ops, and whether the experts are SwiGLU."""

    tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    glu: bool = False


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op.

    Attributes:
        arguments: positional arguments.
        work: floating-point operations, or the minimum number of bytes to read and write.
        unit: unit of `work` per second.
    """

    arguments: tuple[Any, ...]
    work: int
    unit: str = "B/s"


# Sizes of the layers of `benchmarks.layer` (on a GPU, of its layers A, B and D).
SIZES = {
    "cpu": {
        "k1": Sizes(tokens=4096, model_dim=512, hidden_dim=2048, num_experts=8, top_k=1),
        "k2": Sizes(tokens=4096, model_dim=512, hidden_dim=2048, num_experts=8, top_k=2),
        "k8": Sizes(tokens=4096, model_dim=512, hidden_dim=256, num_experts=64, top_k=8),
    },
    "cuda": {
        "k1": Sizes(tokens=32768, model_dim=1024, hidden_dim=4096, num_experts=8, top_k=1),
        "k2": Sizes(tokens=32768, model_dim=2048, hidden_dim=8192, num_experts=8, top_k=2),
        "k8": Sizes(tokens=32768, model_dim=2048, hidden_dim=1024, num_experts=64, top_k=8, glu=True),
    },
}
TINY = Sizes(tokens=16, model_dim=8, hidden_dim=12, num_experts=3, top_k=2)
QUICK = {"tiny": TINY, "tiny_glu": replace(TINY, glu=True)}


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The tensors of one layer that ops get as arguments.

    Attributes:
        x_TD, y_TD: token values in the benchmark's dtype, which is also that of all weights and rows.
        logits_TE: fp32, or fp64 for fp64 values. A token's logits differ so much that their order is
            the same in every precision.
        weights_TK: weights of the assignments, in the dtype of the logits.
        ids_TK: int64, every token's experts, drawn with equal probability.
        row_of_TK, source_of_R: int64, row maps that are inverse to each other; rows are sorted by expert.
        token_of_R: int64, the token of every row.
        gate_R: the weight of every row.
        rows_RD: the experts' outputs.
        a_RH, h_RH, g_RH: hidden rows; h and g exist only for SwiGLU.
        fc1, fc2, fc3: weights [E, H, D], [E, D, H] and, for SwiGLU, [E, H, D].
        groups: the rows of each expert.
    """

    x_TD: Tensor
    y_TD: Tensor
    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    row_of_TK: Tensor
    source_of_R: Tensor
    token_of_R: Tensor
    gate_R: Tensor
    rows_RD: Tensor
    a_RH: Tensor
    h_RH: Tensor | None
    g_RH: Tensor | None
    fc1: Tensor
    fc2: Tensor
    fc3: Tensor | None
    groups: Groups

    @property
    def maps_in(self) -> int:
        """Number of weight matrices before the hidden layer."""
        return 1 if self.fc3 is None else 2

    @property
    def product_flops(self) -> int:
        """Floating-point operations of the product of one weight matrix with all rows."""
        return 2 * self.a_RH.numel() * self.x_TD.shape[1]


def make_tensors(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Return random tensors for a layer of these sizes."""
    generator = torch.Generator(device).manual_seed(1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

    tokens, experts, top_k = sizes.tokens, sizes.num_experts, sizes.top_k
    model_dim, hidden_dim, rows = sizes.model_dim, sizes.hidden_dim, tokens * top_k
    wide = torch.promote_types(dtype, torch.float32)
    logits_TE = 0.1 * uniform(tokens, experts).argsort(dim=1).to(wide)
    ids_TK = uniform(tokens, experts).topk(top_k, dim=1).indices
    weights_TK = uniform(tokens, top_k).to(wide)
    source_of_R = ids_TK.flatten().argsort(stable=True)
    glu = sizes.glu
    return Tensors(
        x_TD=normal(tokens, model_dim),
        y_TD=normal(tokens, model_dim),
        logits_TE=logits_TE,
        weights_TK=weights_TK,
        ids_TK=ids_TK,
        row_of_TK=source_of_R.argsort().view(tokens, top_k),
        source_of_R=source_of_R,
        token_of_R=source_of_R // top_k,
        gate_R=weights_TK.flatten()[source_of_R],
        rows_RD=normal(rows, model_dim),
        a_RH=normal(rows, hidden_dim).relu_(),
        h_RH=normal(rows, hidden_dim) if glu else None,
        g_RH=normal(rows, hidden_dim) if glu else None,
        fc1=normal(experts, hidden_dim, model_dim, scale=model_dim**-0.5),
        fc2=normal(experts, model_dim, hidden_dim, scale=hidden_dim**-0.5),
        fc3=normal(experts, hidden_dim, model_dim, scale=model_dim**-0.5) if glu else None,
        groups=Groups.of_tensor(torch.bincount(ids_TK.flatten(), minlength=experts)),
    )


def _gather_rows(t: Tensors) -> Call:
    # A token is read once for each of its assignments.
    work = 2 * t.rows_RD.nbytes + t.token_of_R.nbytes + t.gate_R.nbytes
    return Call(arguments=(t.x_TD, t.token_of_R, t.gate_R), work=work)


def _gather_pair(t: Tensors) -> Call:
    work = 4 * t.rows_RD.nbytes + t.token_of_R.nbytes
    return Call(arguments=(t.x_TD, t.y_TD, t.token_of_R), work=work)


def _gather_sum(t: Tensors) -> Call:
    work = _bytes(t.rows_RD, t.x_TD, t.row_of_TK, t.weights_TK)
    return Call(arguments=(t.rows_RD, t.row_of_TK, t.weights_TK), work=work)


def _gather_gradients(t: Tensors) -> Call:
    work = _bytes(t.rows_RD, t.x_TD, t.row_of_TK, t.gate_R, t.weights_TK)
    return Call(arguments=(t.rows_RD, t.row_of_TK, t.gate_R.unsqueeze(0)), work=work)


def _gather_dot(t: Tensors) -> Call:
    work = _bytes(t.rows_RD, t.y_TD, t.row_of_TK, t.weights_TK)
    return Call(arguments=(t.rows_RD, t.row_of_TK, t.y_TD), work=work)


def _softmax_top_k(t: Tensors) -> Call:
    work = 2 * t.logits_TE.nbytes + _bytes(t.ids_TK, t.weights_TK)
    return Call(arguments=(t.logits_TE, t.ids_TK.shape[1]), work=work)


def _softmax_top_k_backward(t: Tensors) -> Call:
    # A balance loss has a gradient for all probabilities.
    probs_TE = t.logits_TE.softmax(dim=1)
    dprobs_TE = t.logits_TE.flip(0)
    work = 3 * probs_TE.nbytes + _bytes(t.ids_TK, t.weights_TK)
    return Call(arguments=(probs_TE, t.ids_TK, dprobs_TE, t.weights_TK), work=work)


def _assign_rows(t: Tensors) -> Call:
    # The op reads the expert ids, and writes the slots and three row maps.
    return Call(arguments=(t.ids_TK, len(t.fc1)), work=5 * t.ids_TK.nbytes)


def _token_sums(t: Tensors) -> Call:
    return Call(arguments=(t.logits_TE, t.weights_TK, None), work=_bytes(t.logits_TE, t.weights_TK))


def _load_loss(t: Tensors) -> Call:
    mass_E = t.logits_TE.softmax(dim=1).sum(dim=0)
    num_tokens = torch.full((), len(t.x_TD), device=mass_E.device)
    return Call(arguments=(mass_E, t.groups.counts, num_tokens), work=2 * mass_E.nbytes)


def _grouped_linear(t: Tensors) -> Call:
    return _product((t.a_RH, t.fc2, None, t.groups), t.product_flops)


def _grouped_weight_grad(t: Tensors) -> Call:
    return _product((t.rows_RD, t.a_RH, t.groups), t.product_flops)


def _ffn_up(t: Tensors) -> Call:
    arguments = t.x_TD, t.token_of_R, t.fc1, None, t.fc3, None, t.groups, ACTIVATION, True
    return _product(arguments, t.maps_in * t.product_flops)


def _ffn_down_backward(t: Tensors) -> Call:
    kept = (t.a_RH, None, None) if t.fc3 is None else (None, t.h_RH, t.g_RH)
    gates = t.weights_TK.flatten(), t.source_of_R
    arguments = t.rows_RD, *gates, t.fc2, None, *kept, t.groups, ACTIVATION
    return _product(arguments, t.product_flops)


def _ffn_up_backward(t: Tensors) -> Call:
    # Hidden rows serve as gradients, because any values are suitable.
    return _product((t.a_RH, t.fc1, t.g_RH, t.fc3, t.groups), t.maps_in * t.product_flops)


def _product(arguments: tuple[Any, ...], flops: int) -> Call:
    return Call(arguments=arguments, work=flops, unit="FLOP/s")


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


CALLS: dict[str, Callable[[Tensors], Call]] = {
    "gather_rows": _gather_rows,
    "gather_pair": _gather_pair,
    "gather_sum": _gather_sum,
    "gather_gradients": _gather_gradients,
    "gather_dot": _gather_dot,
    "softmax_top_k": _softmax_top_k,
    "softmax_top_k_backward": _softmax_top_k_backward,
    "assign_rows": _assign_rows,
    "token_sums": _token_sums,
    "load_loss": _load_loss,
    "grouped_linear": _grouped_linear,
    "grouped_weight_grad": _grouped_weight_grad,
    "ffn_up": _ffn_up,
    "ffn_down_backward": _ffn_down_backward,
    "ffn_up_backward": _ffn_up_backward,
}
