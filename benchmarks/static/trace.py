"""Records the kernel launches of a function that runs on meta tensors, as a GPU would get them.

Meta tensors have no data. Torch operations compute shapes only, and Triton launches are recorded instead of
run. Every choice by device or hardware is the choice for Hopper.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_tutel import kernels
from fairseq_tutel.kernels import gate_product, triton_launch, triton_ops

# Operations that allocate a tensor or change only its shape. Views are recognized by their schema.
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "detach",
        "lift_fresh", "_reshape_alias")  # fmt: skip
READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "repeat_interleave")


@dataclass
class Trace:
    """The launches of a function, in order.

    Attributes:
        launches: the name of each launch: a Triton function or a torch operation.
        moved: the bytes of each launch. Every tensor argument is read once, and every result written once.
        reads: the torch operations that make the host wait for the device.
    """

    launches: list[str] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The bytes of all launches."""
        return sum(self.moved)

    def add(self, name: str, values: Any) -> None:
        """Add a launch with these arguments and results."""
        tensors = {id(t): t for t in map(_tensor_of, tree_leaves(values)) if t is not None}
        self.launches.append(name)
        self.moved.append(sum(_bytes_of(t) for t in tensors.values()))


def _tensor_of(value: Any) -> Tensor | None:
    value = getattr(value, "base", value)  # a tensor descriptor
    return value if isinstance(value, Tensor) else None


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; a dimension of stride 0 counts as one element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1
    for size, stride in sizes:
        elements *= 1 if stride == 0 and size else size
    return elements * tensor.element_size()


class _Operations(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if name in READS:
            self.trace.reads.append(name)
        elif not op.is_view and name not in FREE and isinstance(result, Tensor | tuple | list):
            self.trace.add(name, (args, kwargs, result))
        return result


@contextmanager
def recorded() -> Iterator[Trace]:
    """Record the launches of the block, in which meta tensors count as tensors on a GPU."""
    trace = Trace()

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        trace.add(kernel.fn.__name__, args)

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(triton.runtime.JITFunction, "run", launch))
        enter(mock.patch.object(triton_launch, "hardware_of", lambda device: "sm_90"))
        enter(mock.patch.object(torch, "is_autocast_enabled", lambda *_: False))
        enter(mock.patch.object(gate_product, "is_supported", lambda x, _: x.dtype == torch.bfloat16))
        enter(mock.patch.object(kernels, "ops", lambda *_: triton_ops.BY_PRODUCTS))
        enter(_Operations(trace))
        yield trace
