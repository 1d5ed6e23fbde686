"""moe_adam: fairseq's Adam, with torch's fused kernel for fp32 parameters.

A MoE model has E times the expert parameters of a dense one for the same FLOPs, so a Python loop of
eight passes per tensor costs more than it does there.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from fairseq.optim import register_optimizer
from fairseq.optim.adam import Adam, FairseqAdam, FairseqAdamConfig
from torch import Tensor

from fairseq_tutel.optim.moe_optimizer import MoEOptimizerMixin


class FusedAdam(Adam):
    """fairseq's Adam with its state dict; fp32 and fp64 parameters take torch's fused AdamW kernel.

    fairseq adds eps to sqrt(v), AdamW to sqrt(v) / sqrt(1 - beta2^t): dividing eps by that root makes
    them the same formula. Half parameters, and gradients that are sparse or strided (the kernel does not
    look at strides), take fairseq's own loop.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        if not self._can_fuse():
            return super().step(closure)
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            by_step: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_step[self._advance(p), p.device, p.dtype].append(p)
            for (step, device, _), params in by_step.items():
                self._fused_step(group, params, step, device)
        return loss

    def _can_fuse(self) -> bool:
        return all(
            not group["amsgrad"]
            and all(
                p.dtype in (torch.float32, torch.float64)
                and p.is_contiguous()
                and (p.grad is None or (not p.grad.is_sparse and p.grad.is_contiguous()))
                for p in group["params"]
            )
            for group in self.param_groups
        )

    def _advance(self, p: Tensor) -> int:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        return int(state["step"])

    def _fused_step(
        self, group: dict[str, Any], params: list[Tensor], step: int, device: torch.device
    ) -> None:
        beta1, beta2 = group["betas"]
        step_tensor = torch.tensor(float(step), device=device)
        torch._fused_adamw_(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [step_tensor] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"] / math.sqrt(1 - beta2**step),
            amsgrad=False,
            maximize=False,
        )


class MoEFairseqAdam(MoEOptimizerMixin, FairseqAdam):
    """fairseq's Adam (decoupled weight decay) for experts on several ranks, fused for fp32.

    Where fairseq itself would take apex's fused class (a GPU with apex), that one is kept.
    """

    def __init__(self, cfg: FairseqAdamConfig, params: Any) -> None:
        super().__init__(cfg, params)
        if type(self._optimizer) is Adam:
            self._optimizer = FusedAdam(params, **self.optimizer_config)


def register() -> None:
    """Register moe_adam before the generic twins, which skip a name that is taken."""
    register_optimizer("moe_adam", dataclass=FairseqAdamConfig)(MoEFairseqAdam)
