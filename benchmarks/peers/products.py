"""The experts' products alone: what a layer would take if all that is around them took no time.

It holds, for each expert that has rows, the products of forward and backward in the arrangement that is
quickest for so many rows, and the whole gradients of the weights, made anew in every step and 0 for experts
without rows. Who goes where is known beforehand: the rows of x, and of the gradient times the gate's
weights, lie expert-major before the clock runs. There is no gate, no routing, no gather, no activation
and no sum of copies, so it is not the same function, and nothing checks it here: y and dx are of T rows.

D model_dim, H hidden_dim, E experts, R = T * K rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers.gate import top_k_gate
from benchmarks.peers.variant import Unsupported, Variant
from fairseq_tutel.kernels.products import linear, weight_grad


class Products(Variant):
    """Two or three products an expert forward, twice as many backward."""

    is_layer = False

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__()
        names = ("fc1", "fc2", "fc3") if case.is_glu else ("fc1", "fc2")
        self.maps = nn.ParameterDict({name: inputs.weights[name].clone() for name in names})
        self.counts = inputs.loads_E
        weights_TK, ids_TK, _ = top_k_gate(inputs.x_TD.detach(), inputs.weights["gate"], case.top_k)
        order_R = ids_TK.flatten().argsort(stable=True)
        token_R = order_R // case.top_k
        self.x_RD = inputs.x_TD.detach()[token_R]
        scale_R1 = weights_TK.flatten()[order_R].unsqueeze(1)
        self.dy_RD = inputs.dy_TD[token_R] * scale_R1.to(inputs.dy_TD.dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the outputs of the first T rows."""
        return _Products.apply(self, x_TD, *self.maps.values())

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the maps' gradients by their names."""
        return {name: parameter.grad for name, parameter in self.maps.items()}


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Products, x_TD: Tensor, *maps: Tensor) -> Tensor:
        fc1, fc2, *fc3 = maps
        h_RH = x_TD.new_empty(len(own.x_RD), fc1.shape[1])
        y_RD = torch.empty_like(own.x_RD)
        parts = zip(*(each.split(own.counts) for each in (own.x_RD, h_RH, y_RD)), strict=True)
        for e, (x, h, y) in enumerate(parts):
            if len(x):
                for beside in fc3:
                    linear(x, beside[e], None, h)
                linear(x, fc1[e], None, h)
                linear(h, fc2[e], None, y)
        ctx.own = own
        ctx.save_for_backward(h_RH, *maps)
        return y_RD[: len(x_TD)]

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        own, (h_RH, fc1, fc2, *fc3) = ctx.own, ctx.saved_tensors
        dfc1, dfc2, *dfc3 = (torch.empty_like(each) for each in (fc1, fc2, *fc3))
        dx_RD = torch.empty_like(own.x_RD)
        place_RH = torch.empty_like(h_RH[: max(own.counts)])
        rows = own.x_RD, own.dy_RD, h_RH, dx_RD
        parts = zip(*(each.split(own.counts) for each in rows), strict=True)
        for e, (x, dy, h, dx) in enumerate(parts):
            if len(x) == 0:
                for each in (dfc1, dfc2, *dfc3):
                    each[e].zero_()
                continue
            dh = torch.mm(dy, fc2[e], out=place_RH[: len(x)])
            weight_grad(dy, h, dfc2[e], None)
            weight_grad(dh, x, dfc1[e], None)
            torch.mm(dh, fc1[e], out=dx)
            for beside, dbeside in zip(fc3, dfc3, strict=True):
                weight_grad(dh, x, dbeside[e], None)
                dx.addmm_(dh, beside[e])
        return None, dx_RD[: len(dy_TD)], dfc1, dfc2, *dfc3


def build(case: Case, inputs: Inputs) -> Products:
    """Return them.

    Raises:
        Unsupported: not on a CPU.
    """
    if inputs.x_TD.device.type != "cpu":
        raise Unsupported("the products one by one are a CPU's")
    return Products(case, inputs)
