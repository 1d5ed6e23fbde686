"""Balance losses and the balance bias, for T tokens, E experts, top_k K and S sentences."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel import kernels
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.moe.choice import scores_of
from fairseq_tutel.moe.routing import GateOutput, Routing, ops_of
from fairseq_tutel.parallel.collectives import Group, all_reduce
from fairseq_tutel.parallel.groups import Topology


def gshard_loss(routing: Routing, gate: GateOutput | None = None) -> Tensor:
    """Return the GShard balance loss of a micro-batch, E * sum_e f_e P_e. The loss is 0 without tokens.

    Padding is ignored. f_e is the fraction of tokens whose first choice is expert e, before dropping. f_e
    has no gradient. P_e is the mean probability of expert e, and is differentiable. The loss is 1 for equal
    expert loads and equal probabilities.

    Args:
        routing: the assignments of the micro-batch.
        gate: the gate output, whose `backend` computes the loss; None selects the best backend.

    Returns: a differentiable scalar in at least fp32.

    The loss is from GShard (Lepikhin et al. 2020), equation 4 and algorithm 1, times E.

    Example:
        >>> even, collapsed = 9 * torch.eye(4), 9 * torch.eye(4)[[0, 0, 0, 0]]
        >>> [round(float(ft.gshard_loss(ft.route(logits, 1))), 2) for logits in (even, collapsed)]
        [1.0, 4.0]
    """
    return _load_times_probability(routing, routing.assigned_KE[0], gate)


def gshard_all_loss(routing: Routing, gate: GateOutput | None = None) -> Tensor:
    """Return the GShard balance loss with a fraction f_e that counts all K choices, not only the first."""
    return _load_times_probability(routing, routing.assigned_KE.sum(dim=0), gate)


def gshard_global_loss(routing: Routing, gate: GateOutput) -> Tensor:
    """Return the GShard balance loss with the expert loads of all ranks of the layer's topology.

    The probabilities are only from the tokens of this rank.

    In training, this function runs one all-reduce of E numbers. The loss is from Qiu et al. 2025.
    """
    assigned_E = routing.assigned_KE.sum(dim=0)
    if gate.topology is not None and gate.topology.world_size > 1:
        operation = "the all-reduce of expert loads for the gshard_global loss"
        all_reduce(assigned_E, operation, gate.topology.group)
    return _load_times_probability(routing, assigned_E, gate)


def gshard_sequence_loss(routing: Routing, gate: GateOutput) -> Tensor:
    """Return the mean over sentences of each sentence's balance loss (DeepSeek-V3, equations 17 to 20)."""
    probs_TE = _real_probs(routing)
    num_tokens, num_experts = probs_TE.shape
    count, time = gate.sentences or (1, num_tokens)
    shape = (time, count, num_experts) if gate.time_first else (count, time, num_experts)
    over = 0 if gate.time_first else 1
    requested_TK = (routing.slots_TK >= 0).to(probs_TE.dtype)
    assigned_TE = torch.zeros_like(probs_TE).scatter_(1, routing.expert_ids_TK, requested_TK)
    load_SE = assigned_TE.view(shape).sum(over)
    mass_SE = probs_TE.view(shape).sum(over)
    real_T = probs_TE.new_ones(num_tokens) if routing.real_T is None else routing.real_T
    tokens_S = real_T.to(probs_TE.dtype).view(shape[:2]).sum(over)
    share_SE = load_SE / load_SE.sum(dim=1, keepdim=True).clamp_min(1)
    loss_S = num_experts * (share_SE * mass_SE).sum(dim=1) / tokens_S.clamp_min(1)
    return loss_S.sum() / (tokens_S > 0).sum().clamp_min(1)


def load_importance_loss(routing: Routing, gate: GateOutput) -> Tensor:
    """Return the mean of the importance loss and the load loss of noisy gates (Shazeer et al. 2017).

    The loss is (cv^2(importance) + cv^2(load)) / 2. Importance_e is the sum of expert e's noise-free
    probabilities over tokens. Load_e is the sum over tokens of Phi((logit_e - rival_e) / noise), the
    probability that expert e is among the K best experts if its noise is drawn again. The number rival_e is
    the K-th largest noisy logit of the other experts. cv^2 is the variance over experts divided by the
    squared mean.

    The loss is from Shazeer et al. 2017, sections 4 and A, equations 6 to 11.
    """
    top_k = min(routing.assigned_KE.shape[0], routing.probs_TE.shape[1])
    clean_TE, noisy_TE = _wide(gate.clean_TE), _wide(gate.logits_TE)
    importance = _cv_squared(routing, scores_of(clean_TE, gate.score_function)[1])
    if top_k == noisy_TE.shape[1]:  # Every token chooses every expert, so cv^2(load) is 0.
        return importance / 2
    best_TK = noisy_TE.topk(top_k + 1, dim=1).values
    is_chosen_TE = noisy_TE > best_TK[:, top_k:]
    rival_TE = torch.where(is_chosen_TE, best_TK[:, top_k:], best_TK[:, top_k - 1 : top_k])
    ahead_TE = (clean_TE - rival_TE) / gate.noise
    # An expert with logit -inf, which a custom gate excludes, has probability 0 for every value of rival_e.
    chance_TE = _normal_cdf(ahead_TE.masked_fill(clean_TE == -math.inf, -math.inf))
    return (importance + _cv_squared(routing, chance_TE)) / 2


def load_importance_tutel_loss(routing: Routing, gate: GateOutput) -> Tensor:
    """Return Tutel's variant of the load_importance loss.

    Tutel replaces logit_e by expert e's probability, and rival_e by the K-th largest of all noisy logits.
    """
    top_k = min(routing.assigned_KE.shape[0], routing.probs_TE.shape[1])
    probs_TE = torch.softmax(_wide(gate.clean_TE), dim=1)
    threshold_T1 = _wide(gate.logits_TE).topk(top_k, dim=1).values[:, -1:]
    chance_TE = _normal_cdf((probs_TE - threshold_T1) / gate.noise)
    return (_cv_squared(routing, probs_TE) + _cv_squared(routing, chance_TE)) / 2


def z_loss(routing: Routing, gate: GateOutput) -> Tensor:
    """Return the router z-loss: the mean over tokens of (log sum_e exp logit_e)^2 (ST-MoE, equation 5)."""
    square_T = torch.logsumexp(_wide(gate.logits_TE), dim=1).square()
    if routing.real_T is not None:
        square_T = square_T.masked_fill(~routing.real_T, 0.0)
    return square_T.sum() / routing.num_tokens.clamp_min(1)


def _load_times_probability(routing: Routing, load_E: Tensor, gate: GateOutput | None) -> Tensor:
    """Return E * sum_e (expert e's share of the load) * (expert e's mean probability)."""
    ops = ops_of(gate, load_E.device)
    if ops is kernels.reference:
        return ops.load_loss(_real_probs(routing).sum(dim=0), load_E, routing.num_tokens)[0]
    mass_E = routing.sums[: load_E.shape[0]]
    return _LoadLoss.apply(routing.probs_TE, routing.real_T, mass_E, load_E, routing.num_tokens, ops)


class _LoadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probs_TE: Tensor,
        real_T: Tensor | None,
        mass_E: Tensor,
        load_E: Tensor,
        num_tokens: Tensor,
        ops: Any,
    ) -> Tensor:
        loss, gradient_E = ops.load_loss(mass_E, load_E, num_tokens)
        ctx.save_for_backward(gradient_E, real_T)
        ctx.shape, ctx.dtype = probs_TE.shape, probs_TE.dtype
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradient_E, real_T = ctx.saved_tensors
        dprobs_TE = (dloss * gradient_E).to(ctx.dtype).expand(ctx.shape)
        if real_T is not None:
            dprobs_TE = dprobs_TE.masked_fill(~real_T.unsqueeze(1), 0.0)
        return dprobs_TE, None, None, None, None, None


def _cv_squared(routing: Routing, values_TE: Tensor) -> Tensor:
    """Return the squared coefficient of variation of experts' sums over real tokens; 0 for one expert."""
    total_E = _without_padding(routing, values_TE).sum(0)
    if total_E.shape[0] == 1:
        return total_E.sum() * 0
    return total_E.var() / (total_E.mean().square() + 1e-10)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _wide(x: Tensor) -> Tensor:
    """Convert a tensor to fp32 or wider, because half precision cannot represent large token counts."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _real_probs(routing: Routing) -> Tensor:
    return _without_padding(routing, _wide(routing.probs_TE))


def _without_padding(routing: Routing, values_TE: Tensor) -> Tensor:
    """Set the values of padding tokens to 0."""
    if routing.real_T is None:
        return values_TE
    return values_TE.masked_fill(~routing.real_T.unsqueeze(1), 0.0)


# This table maps the names of --moe-balance-loss to balance losses. The loss of Switch Transformers (Fedus
# et al. 2021, equations 4 to 6) equals GShard's, because both losses count first choices.
LOSSES: dict[str, Callable[[Routing, GateOutput], Tensor]] = {
    "gshard": gshard_loss,
    "gshard_all": gshard_all_loss,
    "gshard_sequence": gshard_sequence_loss,
    "gshard_global": gshard_global_loss,
    "switch": gshard_loss,
    "load_importance": load_importance_loss,
    "load_importance_tutel": load_importance_tutel_loss,
    "z": z_loss,
}


def balance_losses(names: dict[str, float], routing: Routing, gate: GateOutput) -> dict[str, Tensor]:
    """Return the unweighted balance loss, a scalar, for each name in `names`."""
    return {name: LOSSES[name](routing, gate) for name in names}


class BalanceBias(nn.Module):
    """A bias on expert scores, which is higher for underloaded experts (Wang et al. 2024)."""

    bias: Tensor
    load: Tensor

    def __init__(self, num_experts: int, rate: float, topology: Topology | None = None) -> None:
        super().__init__()
        self.rate, self.topology = rate, topology or Topology()
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def count(self, assigned_KE: Tensor) -> None:
        """Add a micro-batch's assignments, dropped or not, to the experts' loads."""
        self.load.add_(assigned_KE.sum(dim=0))

    @torch.no_grad()
    def update(self, load_E: Tensor) -> None:
        """Raise the bias of underloaded experts, lower that of overloaded experts, and reset all loads."""
        # The integers E * mean - E * load have exact signs, which are the same on every rank.
        below_E = load_E.sum() - load_E * len(load_E)
        self.bias.add_(below_E.sign().to(self.bias.dtype), alpha=self.rate)
        self.load.zero_()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # If a checkpoint has no balance bias, the bias stays at its initial value.
        state_dict.setdefault(prefix + "bias", self.bias)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The balance bias keeps its dtype in a half-precision model, because steps of 0.001 vanish in bf16.
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self


def update_biases(model: nn.Module) -> None:
    """Update each layer's balance bias from the loads of all ranks of the layer's topology. Collective.

    The loads count all micro-batches since the previous call of this function. Custom training loops must
    call this function after every optimizer step. fairseq's tasks call this function automatically. The
    bias of a layer whose gate is frozen stays the same.

    Example:
        >>> config = ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8, balance_bias=True)
        >>> layer = ft.MoELayer(config)
        >>> y, output = layer(torch.randn(10, 64))
        >>> ft.update_biases(layer)
        >>> float(layer.balance_bias.bias.abs().max())  # `bias_update_rate`
        0.0010000000474974513
    """
    of_groups: dict[Group, list[BalanceBias]] = {}
    layers: Iterator[Any] = (each for each in model.modules() if hasattr(each, "balance_bias"))
    for layer in layers:
        gates, bias = nn.ModuleList([layer.gate, *layer.other_gates]), layer.balance_bias
        if bias is not None and {each.requires_grad for each in gates.parameters()} != {False}:
            of_groups.setdefault(bias.topology.group, []).append(bias)
    for group, biases in of_groups.items():
        load = torch.cat([bias.load for bias in biases])
        all_reduce(load, "the all-reduce of expert loads for the balance bias", group)
        for bias, load_E in zip(biases, load.split([len(b.load) for b in biases]), strict=True):
            bias.update(load_E)
