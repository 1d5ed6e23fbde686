"""The base class of experts, with stacked parameters. E experts, e local experts, s shards per expert."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.build import is_hooked
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.option import require
from fairseq_tutel.parallel.gradients import mark_expert, mark_root_scaled
from fairseq_tutel.parallel.groups import Part, Slice, cut, mark_slice
from fairseq_tutel.parallel.regroup import permute

Tensors = Mapping[str, Any]


class Weights:
    """The source of experts' weight tensors: given tensors, or the parameters of the stack."""

    are_own: bool = True  # whether other ranks can gather these tensors
    of_all: bool = False  # whether this rank has the tensors of all experts and need not send rows
    _tensors: Tensors | None = None

    def __init__(self, tensors: Tensors | None = None, of_all: bool = False) -> None:
        self._tensors, self.are_own, self.of_all = tensors, tensors is None, of_all

    def of_groups(self, stack: "ExpertStack", groups: Groups) -> tuple[Tensors, Groups]:
        """Return the experts' weights by name, and the groups of rows of these experts.

        A subclass may omit experts without rows. The tensors [n, ...] and groups are then those of the n
        experts with rows, in ascending order. The experts' forward calls this method only after its
        pre-hooks, because pre-hooks of torch.nn.utils.prune compute the tensors.
        """
        if self._tensors is not None:
            return self._tensors, groups
        return {name: getattr(stack, name) for name in stack.names}, groups

    def of_each(self, stack: "ExpertStack", groups: Groups) -> Iterator[Tensors]:
        """Yield the weights of each expert that has rows; quantized experts are unpacked one at a time."""
        tensors, groups = self.of_groups(stack, groups)
        for e, count in enumerate(groups.host):
            if count:
                yield {name: tensor[e] for name, tensor in tensors.items()}

    def prefetch(self, stack: "ExpertStack", groups: Groups) -> None:
        """Start to fetch the offloaded experts that have rows; `groups` has the rows of all E experts."""


OWN = Weights()


class ExpertStack(nn.Module):
    """One rank's experts or expert shards of a layer; dimension 0 of each parameter is the expert.

    `load_state_dict` takes this rank's experts from a state dict with all E experts. `state_dict` contains
    this rank's experts by default. `save_as` can make it contain all experts, or references to files.
    """

    # For each stacked tensor, the dimension that is split into expert shards. If empty, experts cannot be
    # split.
    slice_dims: ClassVar[dict[str, int]] = {}
    # Biases of outputs. A shard is a part of the last dimension, and is padded with zeros before the sum.
    added: ClassVar[tuple[str, ...]] = ()
    # Whether `run` also accepts quantized matrices instead of tensors.
    takes_quantized: ClassVar[bool] = False

    def __init__(self, config: MoEConfig, part: Part | None = None) -> None:
        super().__init__()
        self.part = Part(config.num_experts) if part is None else part
        if self.part.slices > 1 and not self.slice_dims:
            raise ValueError(
                f"--moe-expert-parallel-size gives {self.part.slices} ranks to one expert, but expert_type "
                f"(--moe-expert-type) {config.expert_type} cannot be split; give a size of at "
                f"most {config.num_experts}, the number of experts."
            )
        self.config = config
        self.num_local, self.first = self.part.num_local, self.part.first
        self.weights = OWN
        self._compute_device: torch.device | None = None
        self._loads_later = self._is_offloaded = False
        # Tensors of all experts, in memory or (as checkpoint.shards.ShardedTensor) in shard files.
        self._sources: dict[str, Any] | None = None
        self._in_state_dict: Mapping[str, Any] | None = None

    def compute_with(self, weights: Weights) -> None:
        """Use `weights` in later forward passes; `OWN`, the initial value, stands for the parameters."""
        self.weights = weights

    def offload_to(self, weights: Weights) -> None:
        """Use another source of weights; free the memory of the parameters, but keep their shapes."""
        self._compute_device, self.weights, self._is_offloaded = self.device, weights, True
        for name, parameter in self.expert_parameters().items():
            empty = torch.empty_like(parameter, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.mark()

    def load_later(self, keep_sources: bool = False) -> None:
        """Allow `load_state_dict` to replace the parameters of a stack that was built on the meta device.

        A loaded tensor is used without a copy if it fills its storage. With `keep_sources`, `take_sources`
        returns the loaded tensors, and the parameters stay on the meta device.
        """
        self._loads_later, self._sources = True, {} if keep_sources else None
        self._compute_device = torch.device("cpu")

    def take_sources(self) -> Mapping[str, Any]:
        """Return and release the tensors [E, ...], by name, that were loaded after `load_later`."""
        sources, self._sources = self._sources, {}
        return sources or {}

    def save_as(self, tensors: Mapping[str, Any] | None) -> None:
        """Put these tensors into state dicts in place of this rank's experts; None restores the default."""
        self._in_state_dict = tensors

    def forward(self, rows_RD: Tensor, groups: Groups, weights: Weights = OWN) -> Tensor:
        """Run each expert on its group of rows; rows after the last group are not used.

        Rows are sorted by expert. `groups` has one group for each local expert, or for every expert if
        `weights` has all experts. The result is [R, D], or shorter if the rows after the last group are
        omitted.
        """
        tensors, groups = weights.of_groups(self, groups)
        if self.config.recompute_experts and not self.is_one_node and torch.is_grad_enabled():
            return checkpoint(self.run, rows_RD, groups, tensors, use_reentrant=False)
        return self.run(rows_RD, groups, tensors)

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run each expert on its group of rows with the given weights; subclasses implement this method."""
        raise NotImplementedError

    @property
    def is_one_node(self) -> bool:
        """Whether one autograd node computes all experts, and can recompute hidden rows in backward."""
        return False

    @property
    def can_fuse(self) -> bool:
        """Whether `run_fused` can replace the separate steps dispatch, `forward` and combine."""
        return self.is_one_node and not is_hooked(self)

    def run_fused(self, x_TD: Tensor, routing: Routing, weights: Weights = OWN) -> Tensor:
        """Dispatch tokens, run their experts and combine; return each token's weighted sum of outputs."""
        raise NotImplementedError

    def run_unsorted(
        self,
        rows_RD: Tensor,
        groups: Groups,
        to_expert_R: Tensor,
        to_row_R: Tensor,
        weights: Weights = OWN,
    ) -> Tensor:
        """Run the experts on rows in any order, and return the outputs in the order of the rows.

        Args:
            rows_RD: the rows, without unused rows.
            groups: the number of rows of each expert.
            to_expert_R: int64, the row numbers of `rows_RD` in the order of the rows' experts.
            to_row_R: int64, the inverse of `to_expert_R`.
            weights: as in `forward`.
        """
        sorted_RD = permute(rows_RD, to_expert_R, to_row_R)
        return permute(self(sorted_RD, groups, weights), to_row_R, to_expert_R)

    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialize each expert from a generator seeded by (seed, name, global expert ID, tensor name)."""
        raise NotImplementedError

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters that are stacked by expert, without those of shared modules."""
        return dict(self.named_parameters(recurse=False))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the stacked parameters; `mark` caches them, because pruning renames parameters."""
        return tuple(self.expert_parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the expert weights. Without autocast, the experts' inputs have this dtype, too."""
        return next(d for name in self.names if (d := getattr(self, name).dtype).is_floating_point)

    @property
    def device(self) -> torch.device:
        """The device on which the experts compute; offloaded weights may be on another device."""
        if self._compute_device is not None:
            return self._compute_device
        return next(iter(self.expert_parameters().values())).device

    def prepared(self, tensors: Tensors, device: torch.device) -> Tensors:
        """Convert the weights for one forward pass, for example to autocast's dtype."""
        return tensors

    def slice_of(self, name: str) -> Slice:
        """Return how an expert's parameter is split: the number of shards, and the split dimension."""
        slices = self.part.slices
        return Slice(slices, self.slice_dims[name]) if slices > 1 else Slice()

    def mark(self) -> None:
        """Mark expert parameters for the reduction of gradients, and expert shards for gathering."""
        names = self.names  # the first call caches the names
        is_cut = self.part.slices > 1
        for name, parameter in self.expert_parameters().items():
            if is_cut or self.num_local < self.config.num_experts:
                mark_expert(parameter)
            if self.config.expert_grad_norm == "sqrt_world_size":
                mark_root_scaled(parameter)
            if is_cut and name in names:
                mark_slice(parameter, self.slice_of(name))

    # Moving from the meta device, copying and loading may replace parameters, so the new ones are marked.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self._compute_device is None:
            super()._apply(fn, recurse)
        else:
            self._move_offloaded(fn, recurse)
        self.mark()
        return self

    def _move_offloaded(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Move the experts to another dtype and device; for offloaded experts, only the dtype changes."""

        def moved(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return fn(tensor)
            probe = fn(torch.empty(0, dtype=tensor.dtype, device=self._compute_device))
            devices.append(probe.device)
            return torch.empty_like(tensor, dtype=probe.dtype)

        devices: list[torch.device] = []
        super()._apply(moved, recurse)
        self._compute_device = devices[-1]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark()

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter of one complete expert, not split into shards."""
        shape, slicing = list(self.expert_parameters()[name].shape), self.slice_of(name)
        shape[slicing.dim] *= slicing.count
        return tuple(shape[1:])

    @torch.no_grad()
    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Return a view of this rank's expert shards in a tensor [n, ...] of n complete experts."""
        return cut(whole, self.slice_of(name), self.part.index)

    def _refuse_offloaded(self, prefix: str) -> None:
        require(
            not self._is_offloaded,
            f"{prefix}* are in an expert store, so they cannot be saved or loaded; to save them, open the "
            "checkpoint without an expert store.",
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._refuse_offloaded(prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in (self._in_state_dict or {}).items():
            destination[prefix + name] = tensor
        if self._held() != self._whole() and not self._in_state_dict and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["part"] = self._held()

    def _held(self) -> tuple[int, ...]:
        return (self.config.num_experts, *dataclasses.astuple(self.part))

    def _whole(self) -> tuple[int, ...]:
        return (self.config.num_experts, *dataclasses.astuple(Part(self.config.num_experts)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self._refuse_offloaded(prefix)
        held = local_metadata.get("part", self._whole())
        is_own = held == self._held() != self._whole()  # the state dict has only this rank's experts
        require(
            is_own or held == self._whole(),
            f"the state dict's {prefix}* hold the experts of another rank, {held}; load the file that this "
            "rank saved, or one with all experts.",
        )
        for name, parameter in self.expert_parameters().items():
            key, tensor = prefix + name, state_dict.get(prefix + name)
            if tensor is None or is_own:
                continue
            if self._sources is not None:
                self._check_shape(key, tensor)
                self._sources[name] = tensor
                state_dict[key] = parameter
            elif self._loads_later and parameter.is_meta:
                state_dict[key] = self._take(name, self._local_part(key, tensor))
            else:
                state_dict[key] = self._local_part(key, tensor)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self._loads_later and self._sources is None:
            self._loads_later, self._compute_device = False, None
        self.mark()

    def _take(self, name: str, tensor: Tensor) -> nn.Parameter:
        """Register a loaded tensor as the parameter `name`, and return the parameter."""
        old: nn.Parameter = getattr(self, name)
        if tensor.untyped_storage().nbytes() > tensor.nbytes:  # without a copy, all of it stays in memory
            tensor = tensor.clone()
        taken = nn.Parameter(tensor.to(old.dtype), requires_grad=old.requires_grad)
        self.register_parameter(name, taken)
        return taken

    def _local_part(self, key: str, tensor: Any) -> Tensor:
        name = key.rpartition(".")[2]
        self._check_shape(key, tensor)
        if not isinstance(tensor, Tensor):
            return tensor.read(self.first, self.num_local, self.slice_of(name), self.part.index)
        return self.own_part(name, tensor[self.first : self.first + self.num_local])

    def _check_shape(self, key: str, tensor: Any) -> None:
        expected = (self.config.num_experts, *self.whole_shape(key.rpartition(".")[2]))
        require(
            tuple(tensor.shape) == expected,
            f"the checkpoint's {key} has shape {tuple(tensor.shape)} but this model needs {expected}; "
            "give the --moe-expert-count and --moe-expert-ffn-dim of the saved model.",
        )
