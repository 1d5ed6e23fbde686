"""What all kinds of experts have in common: tensors stacked by expert, of a rank's experts or of all.

e local experts, s slices of an expert.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.comm.slices import Part, Slice, cut, mark_slice
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.shards import ShardedTensor

Tensors = Mapping[str, Any]


class ExpertStack(nn.Module):
    """A rank's part of a layer's experts: every parameter of its own has dimension 0 by expert.

    A state dict holds all E experts by global id: `load_state_dict` takes the local part out of it,
    and `state_dict` gives the whole after `comm.checkpoint` gathered it, records of it after `comm.shards`
    wrote it, else the local part.

    Args:
        config: of the layer.
        part: which of its experts are here; None for all.
    """

    # Along which dimension a stacked tensor is cut where an expert has several ranks; of a kind of
    # expert that cannot be cut, nothing.
    slice_dims: ClassVar[dict[str, int]] = {}
    # Tensors that are added to the output, in its last dimension: a part's stands among zeros.
    added: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: MoEConfig, part: Part | None = None) -> None:
        super().__init__()
        self.part = Part(config.num_experts) if part is None else part
        if self.part.slices > 1 and not self.slice_dims:
            raise ValueError(
                f"--moe-expert-parallel-size gives {self.part.slices} ranks to one expert, but expert_type "
                f"(--moe-expert-type) {config.expert_type} cannot be cut into slices; give a size of at "
                f"most {config.num_experts}, the number of experts."
            )
        self.config = config
        self.num_local, self.first = self.part.num_local, self.part.first
        # How a part that cannot be read ends the loading.
        self.refuse: Callable[[ValueError], NoReturn] = _raise
        # What a state dict holds in place of the local part: all experts, or where they were written.
        self.gathered: dict[str, Any] | None = None
        self.everywhere: dict[str, Tensor] | None = None

    def forward(self, rows_RD: Tensor, groups: Groups, tensors: Tensors | None = None) -> Tensor:
        """Run expert i on its group of rows.

        Args:
            rows_RD: [R, D] expert-major; what lies behind the last group is nobody's.
            groups: rows of each local expert.
            tensors: what to compute with, by the parameters' names; None for `self.tensors()`.

        Returns:
            [R, D], or without the rows behind the last group.
        """
        tensors = self.tensors() if tensors is None else tensors
        if self.checkpoints and torch.is_grad_enabled():
            return checkpoint(self.run, rows_RD, groups, tensors, use_reentrant=False)
        return self.run(rows_RD, groups, tensors)

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run the experts; see `forward`."""
        raise NotImplementedError

    @property
    def checkpoints(self) -> bool:
        """Whether backward runs the experts again instead of keeping what is between their maps."""
        return self.config.recompute_experts

    def reset_parameters(self, seed: int, name: str) -> None:
        """Draw every expert from a generator seeded by (seed, name, global expert id, tensor)."""
        raise NotImplementedError

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters by name, without modules that all experts share."""
        return dict(self.named_parameters(recurse=False))

    def tensors(self) -> Tensors:
        """Return what a forward computes with: the local experts, or all of them where gathered."""
        return self.everywhere or self.expert_parameters()

    def prepared(self, tensors: Tensors, device: torch.device) -> Tensors:
        """Return tensors as every chunk of a forward needs them, so that it is done once."""
        return tensors

    def slice_of(self, name: str) -> Slice:
        """Return how a parameter is cut."""
        slices = self.part.slices
        return Slice(slices, self.slice_dims[name]) if slices > 1 else Slice()

    def mark_slices(self) -> None:
        """Let every cut parameter say so, for who gathers it without knowing its layer."""
        if self.part.slices > 1:
            for name, parameter in self.expert_parameters().items():
                mark_slice(parameter, self.slice_of(name))

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter of one expert that is not cut."""
        shape, how = list(self.expert_parameters()[name].shape), self.slice_of(name)
        shape[how.dim] *= how.count
        return tuple(shape[1:])

    @torch.no_grad()
    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor [n, ...] of n whole experts; a view."""
        return cut(whole, self.slice_of(name), self.part.index)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in (self.gathered or {}).items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in self.expert_parameters():
            tensor = state_dict.get(prefix + name)
            if tensor is not None:
                state_dict[prefix + name] = self._local_part(prefix + name, tensor)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _local_part(self, key: str, tensor: Tensor | ShardedTensor) -> Tensor:
        name = key.rpartition(".")[2]
        expected = (self.config.num_experts, *self.whole_shape(name))
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"the checkpoint's {key} has shape {tuple(tensor.shape)} but this model needs "
                f"{expected}; give the --moe-expert-count and --moe-expert-ffn-dim it was saved with "
                "(a first number below the expert count is a crash file that holds one rank's part)."
            )
        if isinstance(tensor, ShardedTensor):
            how = self.slice_of(name)
            try:
                return tensor.read(self.first, self.num_local, how, self.part.index)
            except ValueError as error:
                self.refuse(error)
        return self.own_part(name, tensor[self.first : self.first + self.num_local])


def _raise(error: ValueError) -> NoReturn:
    raise error
