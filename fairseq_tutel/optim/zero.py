"""A fairseq optimizer of shards: ZeRO beside experts, and optimizer state in host memory."""

import logging
from typing import Any

from torch import Tensor, nn

from fairseq_tutel.optim.moe_optimizer import ONLY_OF_RANK, MoEOptimizerMixin
from fairseq_tutel.optim.zero_plan import plan_of
from fairseq_tutel.ranks import groups
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.state import Shards

logger = logging.getLogger(__name__)


class ShardedOptimizerMixin(MoEOptimizerMixin):
    """Goes before a FairseqOptimizer class; not asked to shard or offload, it is its base.

    The stock optimizer is built on the shards; whoever wraps this one sees an ordinary optimizer of the
    model's parameters, and a checkpoint holds an ordinary state.
    """

    shards: Shards | None = None

    def __init__(self, cfg: Any, params: Any) -> None:
        plan = plan_of(cfg)
        if plan is not None:
            place = groups.in_use()
            params = list(params)
            self.shards = Shards(params, place, plan.stage, plan.offload)
            logger.info(
                "%s: this rank keeps the state of %d of %d parameters' elements%s",
                plan.flags,
                sum(shard.numel() for shard in self.shards.parameters),
                sum(parameter.numel() for parameter in params),
                ", in host memory" if plan.offload else "",
            )
            params = self.shards.parameters
        super().__init__(cfg, params)  # type: ignore[call-arg]

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """Whether half parameters can be given: their shards are fp32."""
        return self.shards is not None or super().supports_memory_efficient_fp16  # type: ignore[misc]

    @property
    def is_apart(self) -> bool:
        """Whether a rank alone has not all of its parameters' state."""
        return self.shards is not None and self.shards.are_apart

    def model_params(self) -> list[nn.Parameter]:
        """Return the model's parameters, in the order of the state's indices."""
        if self.shards is None:
            return super().model_params()
        return [piece.parameter for piece in self.shards.pieces]

    def zero_grad(self) -> None:
        """Forget the gradients of the model's parameters and of the shards."""
        super().zero_grad()  # type: ignore[misc]
        if self.shards is not None:
            self.shards.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Run the backward; under stage 2 gradients leave meanwhile."""
        super().backward(loss)  # type: ignore[misc]
        self.finish_backward()

    def finish_backward(self) -> None:
        """Send what a backward left; for a wrapper that runs it itself."""
        if self.shards is not None:
            self.shards.finish_backward()

    def all_reduce_grads(self, module: Any) -> None:
        """Reduce the gradients of all parameters, a criterion's included, to the ranks that keep them."""
        if self.shards is None or self.shards.stage == 0:
            super().all_reduce_grads(module)
        else:
            self.shards.reduce()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients, when the step widens them."""
        if self.shards is None:
            super().multiply_grads(c)  # type: ignore[misc]
        else:
            self.shards.multiply(c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """Clip by the one norm over all ranks' shards; return it."""
        if self.shards is None:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        self.times_clipped += 1
        return self.shards.clip(max_norm)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the shards, then the weights of all ranks."""
        update = super().step
        if self.shards is None:
            update(*args, **kwargs)
        else:
            self.shards.step(self.optimizer, lambda: update(*args, **kwargs))

    def expert_state(self, index: int) -> dict[str, Tensor]:
        """Return the state of this rank's experts; collective over their replicas, which share it."""
        if self.shards is None:
            return super().expert_state(index)
        # Not in host memory, where a GPU's collectives do not reach it.
        device = self.shards.pieces[index].parameter.device
        return {key: value.to(device) for key, value in self._whole_tensors(index).items()}

    def save_state(self, state: dict[int, dict[str, Any]], place: Topology) -> None:
        """Put these, and other state that is apart, into rank 0's next `state_dict`. Collective."""
        super().save_state(state, place)
        if not self.is_apart:
            return
        for index in range(len(self.model_params())):
            if index in state:
                continue
            whole = self._whole_tensors(index)
            if self._gathered_state is not None:
                self._gathered_state[index] = {key: value.cpu() for key, value in whole.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; marked where it is a part, which was not gathered."""
        state_dict = super().state_dict()
        if self.is_apart and self._gathered_state is None:
            state_dict[ONLY_OF_RANK] = groups.in_use().rank
        return state_dict

    def _whole_tensors(self, index: int) -> dict[str, Tensor]:
        assert self.shards is not None
        state = self.optimizer.state.get(self.shards.parameters[index], {})
        whole = self.shards.whole_state(index, state)
        shape = self.shards.pieces[index].parameter.shape
        return {
            key: whole[key] for key in sorted(whole) if getattr(whole[key], "shape", None) == shape
        }

    def _complete_state(self, state: dict[int, dict[str, Any]]) -> None:
        """Give what is whole on this rank its parameter's shape, in place."""
        if self.shards is None:
            return
        for index, piece in enumerate(self.shards.pieces):
            if piece.share.size == 1:
                whole = self.shards.whole_state(index, state.get(index, {}))
                if whole:
                    state[index] = whole

    def _cut_state(self, state: dict[int, dict[str, Any]]) -> None:
        """Keep this rank's part of a loaded state, in place."""
        if self.shards is None:
            return
        for index in state.keys() & range(len(self.shards.pieces)):
            state[index] = self.shards.own_state(index, state[index])
