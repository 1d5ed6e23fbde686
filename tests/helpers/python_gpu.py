"""A GPU in Python, for machines without one: `with gpu() as device: layer.to("cuda:0") …`.

Tensors report the device cuda:0, cuda:1, … and keep their values in host memory. CUDA's and NCCL's rules hold:

- An operation that mixes tensors of the host and of the GPU raises.
- Operations run on streams. One that uses another stream's tensor without a wait raises.
- Memory that another stream may still use needs a wait, or `record_stream`, before it is freed.
- Collectives take contiguous tensors of the GPU, and run on a stream of their group. The host runs ahead:
  no collective is complete before the test sets `completes`.
- A new thread has device 0.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

from fairseq_tutel import kernels
from fairseq_tutel.comm import collectives
from fairseq_tutel.kernels import opaque

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)
# The shapes of their results depend on values, so the host waits for these.
SHAPED = ("nonzero", "unique", "masked_select", "bincount", "repeat_interleave.Tensor")
NCCL_DTYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
}  # fmt: skip
# Of each collective: its arguments that are written, and those that are read.
COLLECTIVES = {
    "all_reduce": (("tensor",), ()), "broadcast": (("tensor",), ()), "gather": (("gather_list",), ("tensor",)),
    "all_to_all_single": (("output",), ("input",)), "reduce_scatter": (("output",), ("input_list",)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """An entry of a rank's log: the ranks of the group, and the number of elements that the rank sends."""

    name: str
    ranks: tuple[int, ...]
    numel: int


class Device:
    """What a test sees of the GPU of this process; it stays empty for a CPU.

    Attributes:
        name, index: such as cuda:1 and 1.
        waits: why the host waited for the GPU, and for how many elements.
        log: the collectives in the order in which this rank started them.
        faults: memory that was freed too early.
        contexts: the indices of the GPUs on which a thread has created a context.
        allocated, peak: bytes.
        completes: whether a collective that was started is complete.
    """

    def __init__(self, name: str) -> None:
        self.name, self.index, self.completes = name, torch.device(name).index or 0, False
        self.contexts = {self.index}
        self.waits: list[tuple[str, int]] = []
        self.log: list[Collective] = []
        self.faults: list[str] = []
        self.allocated = self.peak = 0
        self.works: list[Work] = []
        self.streams: dict[Any, Stream] = {}  # the default stream by index, NCCL's by group
        self.thread = threading.local()
        self.thread.index = self.index

    @property
    def current(self) -> int:
        """The device of this thread; autograd gives its threads the main thread's."""
        is_new = not isinstance(threading.current_thread(), threading._DummyThread)
        return getattr(self.thread, "index", 0 if is_new else self.index)

    def set_current(self, device: Any) -> None:
        self.thread.index = index_of(device)
        self.contexts.add(self.thread.index)

    def stream(self, device: Any = None) -> "Stream":
        """Return the current stream of this thread on a device."""
        index = index_of(device)
        chosen = getattr(self.thread, "streams", {})
        return chosen.get(index) or self.streams.setdefault(index, Stream(index))

    @contextlib.contextmanager
    def on(self, stream: "Stream | None") -> Iterator[None]:
        """As torch.cuda.stream: afterwards, the thread has the device that it had, with a context on it."""
        if stream is None:
            yield
            return
        device, streams = self.current, getattr(self.thread, "streams", {})
        self.set_current(stream.device)
        self.thread.streams = {**streams, stream.device.index: stream}
        try:
            yield
        finally:
            self.thread.streams = streams
            self.set_current(device)


DEVICE = Device("cpu")


def index_of(device: Any) -> int:
    if not isinstance(device, int | None):
        device = torch.device(device)
        device = DEVICE.index if device.type == "gpu" else device.index  # C++ takes the device of an input
    return DEVICE.current if device is None else device


class Stream:
    """A CUDA stream. `seen` has, by stream, the number of its operations that end before the next one here."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = torch.device("cuda", index_of(device)), priority
        self.seen: dict[Stream, int] = {self: 0}

    def wait_event(self, event: "Event") -> None:
        for stream, number in event.seen.items():
            self.seen[stream] = max(number, self.seen.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.seen = dict(self.seen)
        return event

    def synchronize(self) -> None:
        DEVICE.waits.append(("stream", 0))


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        (stream or DEVICE.stream()).record_event(self)

    def synchronize(self) -> None:
        DEVICE.waits.append(("event", 0))

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Memory:
    """An allocation: its last write and its reads since then, each by stream with the operation's number."""

    def __init__(self, num_bytes: int, stream: Stream) -> None:
        self.num_bytes, self.home, self.device = num_bytes, stream, DEVICE
        self.write = {stream: stream.seen[stream]}
        self.reads: dict[Stream, int] = {}
        self.recorded: set[Stream] = set()
        self.works: list[Work] = []
        DEVICE.allocated += num_bytes
        DEVICE.peak = max(DEVICE.peak, DEVICE.allocated)

    def use(self, stream: Stream, writes: bool, what: str) -> None:
        """Note the last operation of a stream; raise if it does not wait for what it depends on."""
        before = self.write | self.reads if writes else self.write
        if any(stream.seen.get(other, 0) < number for other, number in before.items()):
            raise RuntimeError(f"{what} uses a tensor of another stream without a wait")
        if writes:
            self.write, self.reads = {}, {}
        (self.write if writes else self.reads)[stream] = stream.seen[stream]

    def __del__(self) -> None:
        self.device.allocated -= self.num_bytes
        for stream, number in (self.write | self.reads).items():
            if all(each.seen.get(stream, 0) < number for each in (self.home, *self.recorded)):
                self.device.faults.append(f"{self.num_bytes} bytes were freed while a stream used them")


class OnGpu(Tensor):
    """A tensor on the GPU. Its values are in `held`. Python sees the device cuda:index, C++ sees gpu:0."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, memory: Memory, index: int) -> "OnGpu":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device("gpu", 0), **layout)

    def __init__(self, held: Tensor, memory: Memory, index: int) -> None:
        self.held, self.memory, self.index = held, memory, index

    def _set_data(self, value: "OnGpu") -> None:
        Tensor.data.__set__(self, value)
        self.held, self.memory, self.index = value.held, value.memory, value.index

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    data = property(lambda self: Tensor.data.__get__(self), _set_data)

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.held})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(op, *args, **(kwargs or {}))


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that has arguments on the GPU, or makes a tensor there."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in inputs if isinstance(tensor, OnGpu)]
    theirs = [tensor for tensor in inputs if not isinstance(tensor, OnGpu) and tensor.dim() > 0]
    device, name = kwargs.pop("device", None), str(op)
    to_host = device is not None and device.type == "cpu"
    to_host |= op is aten.copy_.default and not isinstance(args[0], OnGpu)
    indices = {tensor.index for tensor in ours}
    if op not in COPIES and (len(indices) > 1 or (ours and theirs and op not in INDEXING)):
        raise RuntimeError(f"{name} mixes tensors of the host and of a GPU, or of two GPUs")
    by_mask = op in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
    is_shaped = any(each in name for each in SHAPED) and kwargs.get("output_size") is None
    if op is aten._local_scalar_dense.default or by_mask or is_shaped:
        DEVICE.waits.append((name, inputs[0].numel()))
    elif (to_host or theirs) and not kwargs.get("non_blocking", args[2:] == (True,)):
        DEVICE.waits.append(("to the host" if to_host else "from the host", inputs[-1].numel()))
    index = index_of(device) if device is not None and not to_host else next(iter(indices))
    stream = DEVICE.stream(index)
    stream.seen[stream] += 1
    infos = [argument.alias_info for argument in op._schema.arguments]
    written = [
        leaf
        for argument, info in zip(args, infos, strict=False)
        if info is not None and info.is_write
        for leaf in tree_leaves(argument)
    ]
    returned = [each.alias_info for each in op._schema.returns]
    is_view = any(info is not None and not info.is_write for info in returned)
    if not is_view and not any(only_shape in name for only_shape in ("aten.new_", "_like.")):
        for tensor in ours:
            settle(tensor)
            tensor.memory.use(stream, any(tensor is each for each in written), name)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    result = op(*values(args), **values(kwargs))
    if to_host:
        return args[0] if op is aten.copy_.default else result
    memories = {tensor.held.untyped_storage()._cdata: tensor.memory for tensor in ours}

    def wrapped(found: Tensor) -> Tensor:
        for tensor in ours:
            if tensor.held is found:
                return tensor
        storage = found.untyped_storage()
        return OnGpu(found, memories.get(storage._cdata) or Memory(storage.nbytes(), stream), index)

    return tree_map_only(Tensor, wrapped, result)


def values(tree: Any) -> Any:
    return tree_map_only(OnGpu, lambda tensor: tensor.held, tree)


def settle(tensor: OnGpu) -> None:
    """Let the collectives that use a tensor end, so that it has its values."""
    while tensor.memory.works:
        tensor.memory.works.pop().real.wait()


class Work:
    """A collective on its group's stream. As NCCL's, it keeps its tensors till `wait`, which blocks a stream."""

    def __init__(self, real: Any, stream: Stream, tensors: list[OnGpu]) -> None:
        self.real, self.end, self.kept = real, stream.record_event(), tensors
        for tensor in tensors:
            tensor.memory.works.append(self)
        DEVICE.works.append(self)

    def is_completed(self) -> bool:
        return DEVICE.completes

    def wait(self) -> None:
        DEVICE.stream().wait_event(self.end)
        self.kept = []


def on_nccl(original: Any, outs: tuple[str, ...], ins: tuple[str, ...]) -> Any:
    """Return a collective with NCCL's rules; its arguments `outs` are written, and `ins` are read."""
    parameters, name = inspect.signature(original), original.__name__

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        is_async, group = given.pop("async_op", False), given.get("group") or dist.group.WORLD
        stream = DEVICE.streams.setdefault(group, Stream(priority=-1))
        stream.wait_stream(DEVICE.stream())
        stream.seen[stream] += 1
        used = {key: [t for t in tree_leaves(given.get(key)) if t is not None] for key in (*outs, *ins)}
        for key, tensors in used.items():
            assert name == "gather" or not isinstance(given[key], list), f"{name}: NCCL would copy a list"
            for tensor in tensors:
                assert isinstance(tensor, OnGpu), f"{name} of a tensor of the host"
                assert tensor.is_contiguous() and tensor.dtype in NCCL_DTYPES, f"{name} of {tensor}"
                settle(tensor)
                tensor.memory.use(stream, key in outs, name)
        ranks = tuple(dist.get_process_group_ranks(group))
        DEVICE.log.append(Collective(name, ranks, used[(*ins, *outs)[0]][0].numel()))
        given = {key: values(value) for key, value in given.items()}
        work = Work(original(**given, async_op=True), stream, [t for each in used.values() for t in each])
        return work if is_async else work.wait()

    return collective


def logged(original: Any) -> Any:
    """Return a collective of Python objects that is logged."""

    @functools.wraps(original)
    def collective(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        DEVICE.log.append(Collective(original.__name__, ranks, 0))
        return original(*args, group=group, **kwargs)

    return collective


def unpinned(allocate: Any) -> Any:
    return lambda *args, pin_memory=False, **kwargs: allocate(*args, **kwargs)


def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    return of_host(data, *args, **kwargs).to(device or "cpu")


of_host = torch.tensor


@functools.cache
def register() -> torch.library.Library:
    """Register the backend; torch has no way to remove it."""
    module = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]  # for autocast
    backend_registration._setup_privateuseone_for_python_backend("gpu", module)
    library = torch.library.Library("_", "IMPL")
    for key in ("CUDA", "PrivateUse1"):  # for functions that make a tensor
        library.fallback(run, key)
    return library


@contextlib.contextmanager
def gpu(index: int = 0) -> Iterator[Device]:
    """Context manager in which this process has GPUs, of which it uses the one with this index."""
    global DEVICE
    register()
    DEVICE = device = Device(f"cuda:{index}")
    with contextlib.ExitStack() as stack:
        replaced = [
            (torch.cuda, "_lazy_init", lambda: None), (torch.cuda, "Stream", Stream),
            (torch.cuda, "Event", Event), (torch.cuda, "stream", device.on),
            (torch.cuda, "current_stream", device.stream), (torch.cuda, "set_device", device.set_current),
            (torch.cuda, "current_device", lambda: device.current), (torch, "tensor", tensor),
            (dist, "get_backend", lambda group=None: "nccl"),
            (opaque, "FakeTensor", (opaque.FakeTensor, OnGpu)),
            (collectives, "_all_gather", on_nccl(collectives._all_gather, ("output_tensor",), ("input_tensor",))),
            (collectives, "_reduce_scatter", on_nccl(collectives._reduce_scatter, ("output",), ("input",))),
            *((dist, name, on_nccl(getattr(dist, name), *used)) for name, used in COLLECTIVES.items()),
            *((dist, name, logged(getattr(dist, name))) for name in ("all_gather_object", "broadcast_object_list")),
            *((torch, name, unpinned(getattr(torch, name))) for name in ("empty", "zeros", "empty_like")),
            *([] if kernels.interpreted() else [(kernels, "_lacks_triton", lambda: "there is no GPU")]),
        ]  # fmt: skip
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new))
        yield device
        for work in device.works:
            work.real.wait()
        assert not device.faults, device.faults
