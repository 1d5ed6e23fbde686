"""Simulates a GPU on machines without a GPU, as in `with gpu() as device: layer.to(device.name) …`.

Tensors report the device cuda:0, cuda:1, … and keep their values in host memory. The
simulation checks the rules of CUDA and NCCL:

- An operation that mixes tensors of the host and of the GPU raises an error.
- An operation that uses another stream's tensor without a wait raises an error.
- Before a program frees memory that another stream may use, it must wait or call `record_stream`.
- Collectives take contiguous GPU tensors, and run on a stream of their process group. The host does not
  wait for collectives: no collective is complete before the test sets `completes`.
- A new thread uses GPU 0.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration

from fairseq_tutel import kernels
from fairseq_tutel.kernels import opaque
from fairseq_tutel.parallel import collectives

aten = torch.ops.aten
COPY, READ = aten.copy_.default, aten._local_scalar_dense.default
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)
# The host waits for these operations, because the shapes of their results depend on values.
SHAPED = ("nonzero", "unique", "masked_select", "bincount", "repeat_interleave.Tensor")
NCCL_DTYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
}  # fmt: skip
# The table lists the arguments that each collective writes and the arguments that it reads.
COLLECTIVES = {
    (dist, "all_reduce"): (("tensor",), ()), (dist, "gather"): (("gather_list",), ("tensor",)),
    (dist, "all_to_all_single"): (("output",), ("input",)),
    (dist, "reduce_scatter"): (("output",), ("input_list",)),
    (collectives, "_reduce_scatter"): (("output",), ("input",)),
    (collectives, "_all_gather"): (("output_tensor",), ("input_tensor",)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """A started collective: `ranks` form its process group, and this rank sends `numel` elements."""

    name: str
    ranks: tuple[int, ...]
    numel: int


class Device:
    """Records what happens on this process's simulated GPU.

    `waits` lists the operations for which the host waited. `log` lists the collectives in the order in
    which this rank started them. `faults` lists memory that was freed too early. `contexts` has the indices
    of the GPUs on which threads created CUDA contexts. `peak` is the maximum of allocated bytes. A test
    sets `completes` to make every started collective complete.
    """

    def __init__(self, name):
        self.name, self.index, self.completes = name, torch.device(name).index or 0, False
        self.waits, self.log, self.faults, self.works = [], [], [], []
        self.contexts, self.allocated, self.peak = {self.index}, 0, 0
        self.streams = {}  # Keys are GPU indices for default streams and groups for NCCL streams.
        self.thread = threading.local()
        self.thread.index = self.index

    @property
    def current(self):
        """The index of this thread's GPU; autograd threads use the main thread's GPU."""
        by_autograd = isinstance(threading.current_thread(), threading._DummyThread)
        return getattr(self.thread, "index", self.index if by_autograd else 0)

    def set_current(self, device):
        self.thread.index = index_of(device)
        self.contexts.add(self.thread.index)

    def stream(self, device=None):
        """Return the current stream of this thread on a device."""
        index = index_of(device)
        chosen = getattr(self.thread, "streams", {})
        return chosen.get(index) or self.streams.setdefault(index, Stream(index))

    @contextlib.contextmanager
    def on(self, stream):
        """Works like torch.cuda.stream; the end of the context restores the thread's device."""
        index, streams = self.current, getattr(self.thread, "streams", {})
        self.set_current(stream.device)
        self.thread.streams = {**streams, stream.device.index: stream}
        try:
            yield
        finally:
            self.thread.streams = streams
            self.set_current(index)


DEVICE = Device("cpu")


def index_of(device):
    if not isinstance(device, int | None):
        device = torch.device(device)
        device = DEVICE.index if device.type == "gpu" else device.index  # C++ sees every GPU as gpu:0.
    return DEVICE.current if device is None else device


class Stream:
    """A CUDA stream; `seen` counts, for each stream, the operations for which this stream has waited."""

    def __init__(self, device=None, priority=0):
        self.device, self.priority, self.seen = torch.device("cuda", index_of(device)), priority, {self: 0}

    def wait_event(self, event):
        for stream, number in event.seen.items():
            self.seen[stream] = max(number, self.seen.get(stream, 0))

    wait_stream = wait_event  # Wait for all earlier operations of the other stream.

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def synchronize(self):
        DEVICE.waits.append(("stream", 0))


class Event:
    """A CUDA event."""

    def record(self, stream=None):
        self.seen = dict((stream or DEVICE.stream()).seen)

    def synchronize(self):
        DEVICE.waits.append(("event", 0))


class Memory:
    """Holds the numbers of an allocation's last write, and of each stream's last read after this write."""

    def __init__(self, num_bytes, stream):
        self.num_bytes, self.home, self.device = num_bytes, stream, DEVICE
        self.write, self.reads = {stream: stream.seen[stream]}, {}
        self.recorded, self.works = set(), []
        DEVICE.allocated += num_bytes
        DEVICE.peak = max(DEVICE.peak, DEVICE.allocated)

    def use(self, stream, writes, what):
        """Record an operation on a stream, or raise an error if the stream lacks a required wait."""
        before = self.write | self.reads if writes else self.write
        if any(stream.seen.get(other, 0) < number for other, number in before.items()):
            raise RuntimeError(f"{what} uses a tensor of another stream without a wait")
        if writes:
            self.write, self.reads = {}, {}
        (self.write if writes else self.reads)[stream] = stream.seen[stream]

    def __del__(self):
        self.device.allocated -= self.num_bytes
        for stream, number in (self.write | self.reads).items():
            if all(each.seen.get(stream, 0) < number for each in (self.home, *self.recorded)):
                self.device.faults.append(f"{self.num_bytes} bytes were freed while a stream used them")


class OnGpu(Tensor):
    """A GPU tensor with its values in `held`; Python sees the device cuda:INDEX, and C++ sees gpu:0."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held, memory, index):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device("gpu", 0), **layout)

    def __init__(self, held, memory, index):
        self.held, self.memory, self.index = held, memory, index

    def _set_data(self, value):
        Tensor.data.__set__(self, value)
        self.held, self.memory, self.index = value.held, value.memory, value.index

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    data = property(Tensor.data.__get__, _set_data)

    def __repr__(self, **_):
        return f"OnGpu({self.held})"

    def tolist(self):
        return self.cpu().tolist()

    def record_stream(self, stream):
        self.memory.recorded.add(stream)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return run(op, *args, **(kwargs or {}))


def run(op, *args, **kwargs):
    """Run an operation that has arguments on the GPU, or that creates a tensor on the GPU."""
    name, device = str(op), kwargs.pop("device", None)
    inputs = tensors_of((args, kwargs))
    ours = [tensor for tensor in inputs if isinstance(tensor, OnGpu)]
    theirs = [tensor for tensor in inputs if not isinstance(tensor, OnGpu) and tensor.dim() > 0]
    to_host = (device is not None and device.type == "cpu") or (
        op is COPY and not isinstance(args[0], OnGpu)
    )
    indices = {tensor.index for tensor in ours}
    if op is not COPY and (len(indices) > 1 or (ours and theirs and op not in INDEXING)):
        raise RuntimeError(f"{name} mixes tensors of the host and of a GPU, or of two GPUs")
    by_mask = op in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
    is_shaped = any(each in name for each in SHAPED) and kwargs.get("output_size") is None
    if op is READ or by_mask or is_shaped:
        DEVICE.waits.append((name, inputs[0].numel()))
    elif (to_host or theirs) and not kwargs.get("non_blocking", args[2:] == (True,)):
        DEVICE.waits.append(("to the host" if to_host else "from the host", inputs[-1].numel()))
    index = index_of(device) if device is not None and not to_host else next(iter(indices))
    stream = DEVICE.stream(index)
    stream.seen[stream] += 1
    infos = [argument.alias_info for argument in op._schema.arguments]
    written = tensors_of([a for a, info in zip(args, infos, strict=False) if info and info.is_write])
    is_view = any(each.alias_info and not each.alias_info.is_write for each in op._schema.returns)
    for tensor in ours:
        if not (is_view or "aten.new_" in name or "_like." in name):
            settle(tensor)
            tensor.memory.use(stream, any(tensor is each for each in written), name)
    result = op(
        *values(args), **values(kwargs), **({} if device is None else {"device": torch.device("cpu")})
    )
    if to_host:
        return args[0] if op is COPY else result
    memories = {tensor.held.untyped_storage()._cdata: tensor.memory for tensor in ours}

    def wrapped(found):
        if not isinstance(found, Tensor):
            return found
        for tensor in ours:
            if tensor.held is found:
                return tensor
        storage = found.untyped_storage()
        return OnGpu(found, memories.get(storage._cdata) or Memory(storage.nbytes(), stream), index)

    return mapped(wrapped, result)


def mapped(function, tree):
    """Apply a function to the leaves of nested lists, tuples and dicts, faster than torch's pytree."""
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(function, each) for each in tree])
    if isinstance(tree, dict):
        return {key: mapped(function, each) for key, each in tree.items()}
    return function(tree)


def values(tree):
    return mapped(lambda leaf: leaf.held if isinstance(leaf, OnGpu) else leaf, tree)


def tensors_of(tree):
    found = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found


def settle(tensor):
    """Complete the collectives that use a tensor, so that the tensor has the results."""
    while tensor.memory.works:
        tensor.memory.works.pop().real.wait()


class Work:
    """A collective on the stream of its group; as in NCCL, a stream that waits releases its tensors."""

    def __init__(self, real, stream, tensors):
        self.real, self.end, self.kept = real, stream.record_event(), tensors
        for tensor in tensors:
            tensor.memory.works.append(self)
        DEVICE.works.append(self)

    def is_completed(self):
        return DEVICE.completes

    def wait(self):
        DEVICE.stream().wait_event(self.end)
        self.kept = []


def on_nccl(original, outs, ins):
    """Wrap a collective, which writes arguments `outs` and reads `ins`, so that it follows NCCL's rules."""
    parameters, name = inspect.signature(original), original.__name__

    @functools.wraps(original)
    def collective(*args, **kwargs):
        given = parameters.bind(*args, **kwargs).arguments
        is_async, group = given.pop("async_op", False), given.get("group") or dist.group.WORLD
        stream = DEVICE.streams.setdefault(group, Stream())
        stream.wait_stream(DEVICE.stream())
        stream.seen[stream] += 1
        used = {key: tensors_of(given.get(key)) for key in (*outs, *ins)}
        for key, tensors in used.items():
            assert name == "gather" or not isinstance(given[key], list), f"{name}: NCCL would copy a list"
            for tensor in tensors:
                assert isinstance(tensor, OnGpu), f"{name} of a tensor of the host"
                assert tensor.is_contiguous() and tensor.dtype in NCCL_DTYPES, f"{name} of {tensor}"
                settle(tensor)
                tensor.memory.use(stream, key in outs, name)
        log(name, group, used[(*ins, *outs)[0]][0].numel())
        given = {key: values(value) for key, value in given.items()}
        work = Work(original(**given, async_op=True), stream, [t for each in used.values() for t in each])
        return work if is_async else work.wait()

    return collective


def of_objects(original):
    @functools.wraps(original)
    def collective(*args, group=None, **kwargs):
        log(original.__name__, group or dist.group.WORLD, 0)
        return original(*args, group=group, **kwargs)

    return collective


def log(name, group, numel):
    DEVICE.log.append(Collective(name, tuple(dist.get_process_group_ranks(group)), numel))


def unpinned(allocate):
    return lambda *args, pin_memory=False, **kwargs: allocate(*args, **kwargs)


of_host = torch.tensor

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="not run: needs a machine without a GPU")


@functools.cache
def register():
    """Register the simulated backend, which torch cannot remove, before autograd starts its threads."""
    if torch.cuda.is_available():
        return None
    module = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # for autocast
    backend_registration._setup_privateuseone_for_python_backend("gpu", module)
    library = torch.library.Library("_", "IMPL")
    for key in ("CUDA", "PrivateUse1"):  # These dispatch keys include functions that create a tensor.
        library.fallback(run, key)
    # In torch's CUDA builds, the key CUDA already has functions, which need a driver.
    creating = torch.library.Library("aten", "IMPL", "CUDA")
    for op in (aten.empty.memory_format, aten.empty_strided.default):
        creating.impl(op, functools.partial(run, op))
    return library, creating


@contextlib.contextmanager
def gpu(index=0):
    """Make this process compute on the simulated GPU with this index, and yield the GPU's `Device`."""
    global DEVICE
    register()
    DEVICE = device = Device(f"cuda:{index}")
    replaced = [
        (torch.cuda, "_lazy_init", lambda: None), (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event), (torch.cuda, "stream", device.on),
        (torch.cuda, "current_stream", device.stream), (torch.cuda, "set_device", device.set_current),
        (torch.cuda, "current_device", lambda: device.current),
        (torch, "tensor", lambda data, device="cpu", **kwargs: of_host(data, **kwargs).to(device or "cpu")),
        *((torch, name, unpinned(getattr(torch, name))) for name in ("empty", "zeros", "empty_like")),
        *((owner, name, on_nccl(getattr(owner, name), *how)) for (owner, name), how in COLLECTIVES.items()),
        *((dist, n, of_objects(getattr(dist, n))) for n in ("all_gather_object", "broadcast_object_list")),
        (opaque, "FakeTensor", (opaque.FakeTensor, OnGpu)),
        *([] if kernels.interpreted() else [(kernels, "LACKING", "there is no GPU")]),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new))
        yield device
        for work in device.works:
            work.real.wait()
        assert not device.faults, device.faults
