"""fairseq's loss scaling and clipping around an optimizer that keeps the fp32 masters itself."""

from typing import Any

from fairseq.optim import MemoryEfficientFP16Optimizer
from torch import Tensor


class ShardedFP16Optimizer(MemoryEfficientFP16Optimizer):
    """In the place of fairseq's FP16Optimizer, which copies all parameters and gradients to fp32 first.

    Its arithmetic is that one's: fp32 masters, rounded to the model's weights after every step. What
    fairseq wraps here would update half weights; ours are handed half parameters and keep fp32 shards.
    """

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the scaled loss."""
        super().backward(loss)
        self.wrapped_optimizer.finish_backward()

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> Any:
        """Load a state; fairseq would put the file's tensors in the place of what was loaded."""
        self.optimizer.disable_mem_eff_fp16_loading_hack = True
        super().load_state_dict(state_dict, optimizer_overrides)


# The Trainer refuses a checkpoint that an optimizer of another name wrote, and these two read each other's.
ShardedFP16Optimizer.__name__ = "FP16Optimizer"
