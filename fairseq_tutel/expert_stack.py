"""What all kinds of experts have in common: tensors stacked by expert, in a rank's slice or whole.

e local experts.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fairseq_tutel.config import MoEConfig


class ExpertStack(nn.Module):
    """The local slice of a layer's experts: every parameter of its own has dimension 0 by expert.

    A state dict holds all E experts by global id: `load_state_dict` takes the local slice out of it,
    and `state_dict` gives the whole after `comm.checkpoint` gathered it, else the local slice.

    Args:
        config: of the layer.
        num_local: experts of this rank; None for all.
        first: global id of the first of them.
    """

    def __init__(self, config: MoEConfig, num_local: int | None = None, first: int = 0) -> None:
        super().__init__()
        self.config = config
        self.num_local = config.num_experts if num_local is None else num_local
        self.first = first
        self.gathered: dict[str, Tensor] | None = None
        self.everywhere: dict[str, Tensor] | None = None

    def forward(self, rows_RD: Tensor, counts: Sequence[int]) -> Tensor:
        """Run expert i on its counts[i] rows; `counts` is on the host and sums to R."""
        raise NotImplementedError

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw every expert from a generator seeded by (seed, name, global expert id, tensor)."""
        raise NotImplementedError

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters by name, without modules that all experts share."""
        return dict(self.named_parameters(recurse=False))

    def tensors(self) -> dict[str, Any]:
        """Return what a forward computes with: the local slice, or all experts where gathered."""
        return self.everywhere or self.expert_parameters()

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
