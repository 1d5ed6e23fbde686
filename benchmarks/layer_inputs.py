"""Creates the tokens and weights of a case; they are equal for all variants and lead to the case's loads.

Only the tokens determine the loads. Every variant runs its normal gate; all gates choose the same experts.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer_cases import Case

# Logits of the experts that a token chooses are in 2 .. 3, other logits in -1 .. 0. Because of this
# distance, gates choose the same experts in every precision.
OTHERS, CHOSEN = -1.0, 2.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs and weights of a variant.

    Attributes:
        x_TD: tokens, which require a gradient.
        dy_TD: gradient of the output.
        weights: gate [E, D], fc1 [E, H, D], fc2 [E, D, H], for swiglu fc3 [E, H, D].
        ids_TK: [T, K] int64, the experts that every gate must choose.
        loads_E: [E], number of assignments of every expert.
    """

    x_TD: Tensor
    dy_TD: Tensor
    weights: dict[str, Tensor]
    ids_TK: Tensor
    loads_E: list[int]

    @property
    def busiest(self) -> int:
        """Number of assignments of the busiest expert, the smallest capacity that drops nothing."""
        return max(self.loads_E)


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Inputs:
    """Return random inputs of a case, which must not have more experts than dimensions."""
    generator = torch.Generator(device).manual_seed(seed)
    ids_TK = _drawn_experts(case, generator)
    x_TD, gate_ED = _steered(case, ids_TK, generator)

    def uniform(*shape: int) -> Tensor:
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)

    num_experts, model_dim, hidden_dim = case.num_experts, case.model_dim, case.hidden_dim
    weights = {
        "gate": gate_ED,
        "fc1": uniform(num_experts, hidden_dim, model_dim),
        "fc2": uniform(num_experts, model_dim, hidden_dim),
    }
    if case.is_glu:
        weights["fc3"] = uniform(num_experts, hidden_dim, model_dim)
    dy_TD = torch.randn(x_TD.shape, generator=generator, device=device)
    return Inputs(
        x_TD=x_TD.to(dtype).requires_grad_(),
        dy_TD=dy_TD.to(dtype),
        weights={name: weight.to(dtype) for name, weight in weights.items()},
        ids_TK=ids_TK,
        loads_E=torch.bincount(ids_TK.flatten(), minlength=num_experts).tolist(),
    )


def _drawn_experts(case: Case, generator: torch.Generator) -> Tensor:
    """Draw K different experts for every token [T, K] by the case's probabilities (Gumbel top-k)."""
    device = generator.device
    ranks_E = torch.arange(1, case.num_experts + 1, device=device)
    noise_TE = torch.rand(case.tokens, case.num_experts, generator=generator, device=device)
    gumbel_TE = -(-noise_TE.clamp_min(1e-30).log()).log()
    return (gumbel_TE - case.zipf * ranks_E.log()).topk(case.top_k, dim=1).indices


def _steered(case: Case, ids_TK: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens [T, D] and a gate [E, D] whose logits are largest for the tokens' experts."""
    shape_TE, device = (case.tokens, case.num_experts), generator.device
    raised_TE = torch.zeros(shape_TE, device=device).scatter_(1, ids_TK, CHOSEN - OTHERS)
    logits_TE = OTHERS + raised_TE + torch.rand(shape_TE, generator=generator, device=device)
    shape_DE = (case.model_dim, case.num_experts)
    directions_DE = torch.randn(shape_DE, generator=generator, device=device)
    gate_ED = torch.linalg.qr(directions_DE).Q.t().contiguous()
    # The gate's dimensions get the values that lead to the wanted logits; all other dimensions get noise.
    shape_TD = (case.tokens, case.model_dim)
    noise_TD = torch.randn(shape_TD, generator=generator, device=device)
    x_TD = noise_TD + (logits_TE - F.linear(noise_TD, gate_ED)) @ gate_ED
    return x_TD, gate_ED
