"""What all kinds of experts have in common: tensors stacked by expert, of a rank's experts or of all.

e local experts, s slices of an expert.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.comm.gradients import mark_expert, mark_root_scaled
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.ranks.groups import Part, Slice, cut, mark_slice

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Any]


class Weights:
    """Where the tensors come from that experts compute with in a forward: these are their own."""

    # Whether ranks that share an expert may gather it from these.
    are_own: bool = True
    # Whether they are those of all experts, so that no row need travel.
    of_all: bool = False

    def of_groups(self, stack: "ExpertStack", groups: Groups) -> tuple[Tensors, Groups]:
        """Return the tensors by name, and the groups of these experts.

        A source may leave out experts without rows: then the tensors [n, ...] are of the others in
        ascending order, and so are the groups. Asked for within the experts' forward, since hooks, such
        as those of torch.nn.utils.prune, make tensors just before.
        """
        return {name: getattr(stack, name) for name in stack.names}, groups

    def of_each(self, stack: "ExpertStack", groups: Groups) -> Iterator[Tensors]:
        """Yield the tensors of each expert with rows, by name: those of fewer bits are made one by one."""
        tensors, groups = self.of_groups(stack, groups)
        for e, count in enumerate(groups.host):
            if count:
                yield {name: tensor[e] for name, tensor in tensors.items()}

    def expect(self, stack: "ExpertStack", groups: Groups) -> None:
        """Take note that a stack's experts will be asked for soon: those with rows, of all E groups."""


class MadeWeights(Weights):
    """Tensors that were made before: gathered for one forward, or copies of all experts."""

    are_own = False

    def __init__(self, tensors: Tensors, of_all: bool = False) -> None:
        self._tensors, self.of_all = tensors, of_all

    def of_groups(self, stack: "ExpertStack", groups: Groups) -> tuple[Tensors, Groups]:
        """Return them."""
        return self._tensors, groups


OWN = Weights()


class StoredStack(Protocol):
    """A stack [E, ...] that lies elsewhere, as in shard files."""

    shape: tuple[int, ...]

    def read(self, first: int, count: int, slicing: Slice | None = None, index: int = 0) -> Tensor:
        """Return experts first .. first + count - 1, or slice `index` of each."""


class ExpertStack(nn.Module):
    """A rank's part of a layer's experts: every parameter of its own has dimension 0 by expert.

    A state dict holds all E experts by global id: `load_state_dict` takes the local part out of it,
    and `state_dict` gives the whole after `checkpoint.experts` gathered it, records of it after
    `checkpoint.experts` wrote it, else the local part.

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
        self.weights = OWN
        self._away_on: torch.device | None = None
        self._awaits = self._has_left = False
        self._sources: dict[str, Tensor | StoredStack] | None = None
        self._saved_by_rank = False
        self._in_state_dict: Mapping[str, Any] | None = None

    def compute_with(self, weights: Weights) -> None:
        """Take the tensors of the next forwards from elsewhere; from `OWN` is how it begins."""
        self.weights = weights

    def leave_to(self, weights: Weights) -> None:
        """Take the tensors from elsewhere for good, and free the parameters: names and shapes stay."""
        self._away_on, self.weights, self._has_left = self.device, weights, True
        for name, parameter in self.expert_parameters().items():
            empty = torch.empty_like(parameter, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.mark()

    def await_tensors(self, stay: bool = False) -> None:
        """Let `load_state_dict` bring the tensors of a stack that was built on the meta device.

        They take the parameters' place, without a copy where they are all of what they lie in.

        Args:
            stay: they are left where they are, for `take_sources`, and the parameters tell sizes alone.
        """
        self._awaits, self._sources = True, {} if stay else None
        self._away_on = torch.device("cpu")

    def take_sources(self) -> Mapping[str, "Tensor | StoredStack"]:
        """Return the tensors that were left where they are, of all experts, by name, and forget them."""
        sources, self._sources = self._sources, {}
        return sources or {}

    def save_as(self, tensors: Mapping[str, Any] | None) -> None:
        """Let state dicts hold these in place of the local part; None for the local part.

        Args:
            tensors: all experts by name, or records of where they were written.
        """
        self._in_state_dict = tensors

    def save_by_rank(self) -> None:
        """Let `load_state_dict` take this rank's part, too: every rank saves a file of its own."""
        self._saved_by_rank = True

    def forward(self, rows_RD: Tensor, groups: Groups, weights: Weights = OWN) -> Tensor:
        """Run expert i on its group of rows.

        Args:
            rows_RD: [R, D] expert-major; what lies behind the last group is nobody's.
            groups: rows of each local expert, or of all where `weights` are of all.
            weights: what gives the tensors to compute with.

        Returns:
            [R, D], or without the rows behind the last group.
        """
        tensors, groups = weights.of_groups(self, groups)
        if self.checkpoints and torch.is_grad_enabled():
            return checkpoint(self.run, rows_RD, groups, tensors, use_reentrant=False)
        return self.run(rows_RD, groups, tensors)

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Run the experts; see `forward`."""
        raise NotImplementedError

    @property
    def is_hooked(self) -> bool:
        """Whether the module has hooks, as torch.nn.utils.prune installs them."""
        return bool(
            self._forward_pre_hooks
            or self._forward_hooks
            or self._backward_pre_hooks
            or self._backward_hooks
        )

    @property
    def call(self) -> Callable[..., Tensor]:
        """The function that runs the experts: the module if it has hooks, else `forward` itself."""
        return self if self.is_hooked else self.forward

    @property
    def can_fuse(self) -> bool:
        """Whether `run_fused` can replace dispatch, `forward` and combine."""
        return False

    def run_fused(self, x_TD: Tensor, routing: Routing, weights: Weights = OWN) -> Tensor:
        """Return every token's weighted sum over its experts: dispatch, `forward` and combine in one.

        Args:
            x_TD: [T, D].
            routing: of these tokens, in the compact layout.
            weights: as in `forward`.
        """
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

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The stacked tensors, as built; one that is pruned later, say, is no parameter any more."""
        return tuple(self.expert_parameters())

    @property
    def dtype(self) -> torch.dtype:
        """What the experts' rows are in, outside of autocast: the dtype of their weights."""
        dtypes = (getattr(self, name).dtype for name in self.names)
        return next(dtype for dtype in dtypes if dtype.is_floating_point)

    @property
    def device(self) -> torch.device:
        """Where the experts compute, though their weights may lie elsewhere."""
        if self._away_on is not None:
            return self._away_on
        return next(iter(self.expert_parameters().values())).device

    def prepared(self, tensors: Tensors, device: torch.device) -> Tensors:
        """Return tensors as every chunk of a forward needs them, so that it is done once."""
        return tensors

    def slice_of(self, name: str) -> Slice:
        """Return how a parameter is cut."""
        slices = self.part.slices
        return Slice(slices, self.slice_dims[name]) if slices > 1 else Slice()

    def mark(self) -> None:
        """Let every parameter say what it is, for who reduces or gathers it without knowing its layer."""
        names = self.names  # as they are when a layer first asks, here
        is_cut = self.part.slices > 1
        for name, parameter in self.expert_parameters().items():
            if is_cut or self.num_local < self.config.num_experts:
                mark_expert(parameter)
            if self.config.expert_grad_norm == "sqrt_world_size":
                mark_root_scaled(parameter)
            if is_cut and name in names:
                mark_slice(parameter, self.slice_of(name))

    # What may put other parameters in the place of the marked ones: a move from the meta device, a copy,
    # and a state dict that is assigned.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self._away_on is None:
            super()._apply(fn, recurse)
        else:
            self._move_away(fn, recurse)
        self.mark()
        return self

    def _move_away(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Change dtype and device as a move does; parameters without memory stay without."""

        def moved(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return fn(tensor)
            told = fn(torch.empty(0, dtype=tensor.dtype, device=self._away_on))
            devices.append(told.device)
            return torch.empty_like(tensor, dtype=told.dtype)

        devices: list[torch.device] = []
        super()._apply(moved, recurse)
        self._away_on = devices[-1]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark()

    def extra_repr(self) -> str:
        """Return the tensors' shapes."""
        return ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in self.names)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter of one expert that is not cut."""
        shape, slicing = list(self.expert_parameters()[name].shape), self.slice_of(name)
        shape[slicing.dim] *= slicing.count
        return tuple(shape[1:])

    @torch.no_grad()
    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor [n, ...] of n whole experts; a view."""
        return cut(whole, self.slice_of(name), self.part.index)

    def _refuse_left(self, prefix: str) -> None:
        if self._has_left:
            raise ValueError(
                f"{prefix}* are in an expert store, and can be neither saved nor loaded anew; open the "
                "checkpoint once more, to save it without a store."
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._refuse_left(prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in (self._in_state_dict or {}).items():
            destination[prefix + name] = tensor
        if self._saved_by_rank and not self._in_state_dict and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["part"] = self._held()

    def _held(self) -> tuple[int, ...]:
        return (self.config.num_experts, *dataclasses.astuple(self.part))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        self._refuse_left(prefix)
        if self._saved_by_rank:
            self._check_part(state_dict, prefix, local_metadata.get("part"))
        for name, parameter in self.expert_parameters().items():
            key, tensor = prefix + name, state_dict.get(prefix + name)
            if tensor is None:
                continue
            if self._sources is not None:
                self._refuse_unfitting(key, tensor)
                self._sources[name] = tensor
                state_dict[key] = parameter
            elif self._awaits and parameter.is_meta:
                state_dict[key] = self._take(name, self._local_part(key, tensor))
            else:
                state_dict[key] = self._local_part(key, tensor)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self._awaits and self._sources is None:
            self._awaits, self._away_on = False, None
        self.mark()

    def _check_part(self, state_dict: Any, prefix: str, held: tuple[int, ...] | None) -> None:
        """Refuse another rank's part, and say where a part does not tell whose it is."""
        num_experts, mine = self.config.num_experts, self.part.of(self.config.num_experts)
        if held is not None and held not in (self._held(), (num_experts, num_experts, 0, 1, 0)):
            raise ValueError(
                f"the state dict's {prefix}{next(iter(self.expert_parameters()), '')} holds "
                f"{Part(*held[1:]).of(held[0])}, but this rank has {mine}; give every rank the file that "
                "it saved, on as many ranks, or one of all experts."
            )
        if held is None and any(
            self._is_own_part(name, state_dict[prefix + name])
            for name in self.expert_parameters()
            if prefix + name in state_dict
        ):
            logger.warning(
                "%s of a state dict does not say which experts it holds; it is taken for this rank's, %s.",
                prefix[:-1],
                mine,
            )

    def _is_own_part(self, name: str, tensor: Tensor | StoredStack) -> bool:
        """Whether a tensor has the shape of this rank's part, and that is not all experts."""
        own = tuple(self.expert_parameters()[name].shape)
        return own == tuple(tensor.shape) != (self.config.num_experts, *self.whole_shape(name))

    def _take(self, name: str, tensor: Tensor) -> nn.Parameter:
        """Make a tensor that was loaded a parameter, and return it."""
        awaited: nn.Parameter = getattr(self, name)
        if tensor.untyped_storage().nbytes() > tensor.nbytes:  # which would stay, all of it
            tensor = tensor.clone()
        taken = nn.Parameter(tensor.to(awaited.dtype), requires_grad=awaited.requires_grad)
        self.register_parameter(name, taken)
        return taken

    def _local_part(self, key: str, tensor: Tensor | StoredStack) -> Tensor:
        name = key.rpartition(".")[2]
        by_rank = self._saved_by_rank and self._is_own_part(name, tensor)
        if isinstance(tensor, Tensor) and by_rank:
            return tensor
        self._refuse_unfitting(key, tensor)
        if not isinstance(tensor, Tensor):
            return tensor.read(self.first, self.num_local, self.slice_of(name), self.part.index)
        return self.own_part(name, tensor[self.first : self.first + self.num_local])

    def _refuse_unfitting(self, key: str, tensor: Tensor | StoredStack) -> None:
        expected = (self.config.num_experts, *self.whole_shape(key.rpartition(".")[2]))
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"the checkpoint's {key} has shape {tuple(tensor.shape)} but this model needs "
                f"{expected}; {self._fitting()}."
            )

    def _fitting(self) -> str:
        """Return what would give a checkpoint's tensors their shapes."""
        if self._saved_by_rank:
            return (
                f"or, of a rank's own file, {self.num_local} of them; build the layer with the arguments, "
                "and on the number of ranks, that it was saved with"
            )
        return (
            "give the --moe-expert-count and --moe-expert-ffn-dim it was saved with "
            "(a first number below the expert count is a crash file that holds one rank's part)"
        )
