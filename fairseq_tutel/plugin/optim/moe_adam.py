"""The optimizer moe_adam: fairseq's Adam with torch's fused kernel for fp32, and optional fp16 moments."""

import math
from collections import defaultdict
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdam, FairseqAdamConfig
from torch import Tensor

from fairseq_tutel.parallel.gradients import is_expert
from fairseq_tutel.plugin.optim.moe_optimizer import MoEOptimizerMixin

MOMENTS = ("exp_avg", "exp_avg_sq")
FLOAT16_MAX = torch.finfo(torch.float16).max


class FusedAdam(Adam):
    """fairseq's Adam, with torch's fused AdamW kernel for fp32 and fp64 parameters.

    The state dict has the format of fairseq's Adam. Let v be the second moment, and t the step count.
    fairseq's Adam adds eps to sqrt(v), but AdamW adds eps to sqrt(v) / sqrt(1 - beta2^t). This class
    therefore divides eps by sqrt(1 - beta2^t). If a parameter has half precision, or if a gradient is
    sparse or not contiguous, this class runs the step of fairseq's Adam.

    With `fp16_stats`, Adam's moments are stored in fp16, as in OpenAI's Jukebox. Each moment is
    divided by a scale, so its largest element becomes the largest fp16 number. There is one scale per
    dense parameter and one per expert, so an expert's scale is the same on any rank. The scales have the
    same state-dict keys as in fairseq's fp16 class, which needs apex.
    """

    def __init__(self, params: Any, fp16_stats: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self.fp16_stats = fp16_stats

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update each parameter that has a gradient."""
        if self.fp16_stats:
            return self._step_with_fp16_stats(closure)
        self._leave_fp16_stats()
        if not self._can_fuse():
            return super().step(closure)
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            by_step: dict[tuple[int, torch.device, torch.dtype], list[Any]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_step[self._advance(p, group), p.device, p.dtype].append(p)
            for (step, _, _), params in by_step.items():
                grads = [p.grad for p in params]
                self._fused_step(group, params, grads, [self.state[p] for p in params], step)
        return loss

    def _step_with_fp16_stats(self, closure: Any) -> Any:
        """Update parameters one at a time, so at most one parameter's moments are in fp32."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                step, state = self._advance(p, group), self.state[p]
                wide = {key: _widened(state, key, p.device) for key in MOMENTS}
                # The fused kernel updates contiguous fp32 tensors in place.
                p32, grad32 = p.float().contiguous(), p.grad.float().contiguous()
                self._fused_step(group, [p32], [grad32], [wide], step)
                if p32 is not p:
                    p.copy_(p32)
                for key in MOMENTS:
                    over = tuple(range(1, p.dim())) if is_expert(p) else tuple(range(p.dim()))
                    largest = wide[key].abs().amax(dim=over, keepdim=is_expert(p))
                    scale = 1e-8 + largest / FLOAT16_MAX
                    state[key + "_scale"] = scale
                    state[key] = (wide[key] / scale).half()
        return loss

    def _leave_fp16_stats(self) -> None:
        """Convert the fp16 moments of a checkpoint to fp32."""
        for p, state in self.state.items():
            for key in MOMENTS:
                if key + "_scale" in state:
                    state[key] = _widened(state, key, p.device)
                    del state[key + "_scale"]

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

    def _advance(self, p: Tensor, group: dict[str, Any]) -> int:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        # A checkpoint of apex's newer Adam has one step count per parameter group.
        state["step"] = int(state.get("step", group.get("step", 0))) + 1
        return state["step"]

    @staticmethod
    def _fused_step(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Tensor]],
        step: int,
    ) -> None:
        """Update parameters and moments in place; all have the same device, dtype and step count."""
        beta1, beta2 = group["betas"]
        # The step tensor is created on the device, because a copy from the host would synchronize.
        step_tensor = torch.full((), float(step), device=params[0].device)
        torch._fused_adamw_(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
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


def _widened(state: dict[str, Any], key: str, device: torch.device) -> Tensor:
    """Return a moment of Adam in fp32 on `device`, multiplied by its scale if it has one.

    fairseq's memory-efficient wrapper leaves the moments of a loaded checkpoint in host memory.
    """
    scale = torch.as_tensor(state.get(key + "_scale", 1.0), device=device)
    return state[key].to(device, torch.float32) * scale


@register_optimizer("moe_adam", dataclass=FairseqAdamConfig)
class MoEFairseqAdam(MoEOptimizerMixin, FairseqAdam):
    """fairseq's Adam (decoupled weight decay) for experts on several ranks, with a fused fp32 kernel.

    On a GPU with apex, moe_adam uses apex's fused class, as fairseq does, except with these options:

    - --fp16-adam-stats, because apex has one scale for all experts of a rank;
    - ZeRO and offload, because apex cannot update parameters in host memory.
    """

    def __init__(self, cfg: FairseqAdamConfig, params: Any) -> None:
        if cfg.fp16_adam_stats:
            FairseqOptimizer.__init__(self, cfg)  # FairseqAdam.__init__ needs apex.
            self._optimizer = FusedAdam(params, True, **self.optimizer_config)
            return
        super().__init__(cfg, params)
        if type(self._optimizer) is Adam or self.zero is not None:
            self._optimizer = FusedAdam(list(self.params), **self.optimizer_config)
