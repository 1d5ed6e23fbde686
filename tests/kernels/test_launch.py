"""Tests the function that launches all kernels and binds a CUDA context in each thread."""

import ast
import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fairseq_tutel
from fairseq_tutel import kernels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton.backends.compiler import GPUTarget  # noqa: E402

from fairseq_tutel.kernels import triton_launch  # noqa: E402


def launches(path: Path) -> list[str]:
    """Return the kernels of all calls kernel[grid](…), kernel.run(…) and kernel.warmup(…) in a file."""
    called = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    are = [isinstance(f, ast.Subscript) or getattr(f, "attr", "") in ("run", "warmup") for f in called]
    names = [ast.unparse(f.value) for f, is_launch in zip(called, are, strict=True) if is_launch]
    return [name for name in names if name.endswith("kernel")]


def test_one_module_launches_every_kernel():
    folders = Path(kernels.__file__).parent, Path(fairseq_tutel.__file__).parent
    found = {path.name for folder in folders for path in folder.rglob("*.py") if launches(path)}
    assert found == {"triton_launch.py"}


@triton.jit(do_not_specialize=["rows"])
def _copy_kernel(x, y, rows, columns, N: tl.constexpr):
    tl.store(y + tl.arange(0, N) * columns + rows, tl.load(x + tl.arange(0, N)))


@pytest.fixture
def launched(monkeypatch):
    """Record kernel launches on fake devices in a list; CPU tensors stand for GPU tensors."""
    found = []

    class Utils:
        load_binary = staticmethod(lambda *_: (1, 1, 32, 0, 1024))
        get_device_properties = staticmethod(lambda _: {"max_shared_mem": 2**18})
        unload_module = staticmethod(lambda _: None)

    class Driver:
        utils, device, stream = Utils(), 0, 7

        def launcher_cls(self, source, metadata):
            def launcher(*args):
                found.append((source.hash(), *args[:4], args[9:]))

            return launcher

        get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))
        get_current_device = staticmethod(lambda: Driver.device)
        get_current_stream = staticmethod(lambda _: Driver.stream)

    @contextlib.contextmanager
    def device(index):
        before, Driver.device = Driver.device, index
        yield
        Driver.device = before

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(triton_launch, "is_direct", lambda _: True)
    monkeypatch.setattr(triton_launch, "_COMPILED", threading.local())
    monkeypatch.setattr(torch.cuda, "device", device)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *_, device: found.append(("bind", device.index)) or zeros(1))
    return found


def test_a_launch_runs_the_kernel_that_triton_compiles_for_the_arguments(launched):
    gpus = [SimpleNamespace(type="cuda", index=index) for index in range(2)]
    x = torch.zeros_like(torch.empty(64))
    half = x.to(torch.float16)
    cases = [
        (gpu, (3, 2)[:dims], (x_in, x), (rows, columns), n)
        for gpu, dims, x_in, rows, columns, n in (
            (gpus[0], 1, x, 5, 32, 16), (gpus[0], 2, x[1:], 5, 32, 16), (gpus[0], 1, x[4:], 2**40, 32, 16),
            (gpus[0], 1, half, 5, 32, 16), (gpus[0], 1, x, 16, 32, 16),
            (gpus[0], 1, x, 1, 1, 16), (gpus[0], 1, x, 5, 33, 16),
            (gpus[0], 1, x, 5, 2**31, 16), (gpus[0], 1, x, 5, -32, 16), (gpus[0], 1, x, 6, 32, 32),
            (gpus[0], 1, x, 5, 1, 16),
            (gpus[1], 1, x, 5, 32, 16),
        )
    ]  # fmt: skip
    cases.append((gpus[0], (3,), (x, x[1:]), (5, 32), 16))
    for again in range(2):
        for gpu, grid, tensors, numbers, n in cases:
            launched.clear()
            plan = triton_launch.Plan(_copy_kernel, grid, numbers, {"N": n, "num_warps": 1})
            triton_launch.launch(plan, gpu, *tensors)
            assert [("bind", gpu.index)] * (not again) == launched[:-1]
            with torch.cuda.device(gpu.index):
                _copy_kernel[grid](*tensors, *numbers, N=n, num_warps=1)
            ours, tritons = launched[-2:]
            assert ours[:5] == tritons[:5] and len(ours[5]) == len(tritons[5]) == 5
            assert all(a is b or a == b for a, b in zip(ours[5], tritons[5], strict=True))
    with mock.patch.object(triton.runtime.JITFunction, "run", side_effect=AssertionError):
        for gpu, grid, tensors, numbers, n in cases:  # a second launch does not call Triton's `run`
            plan = triton_launch.Plan(_copy_kernel, grid, numbers, {"N": n, "num_warps": 1})
            triton_launch.launch(plan, gpu, *tensors)


def test_a_process_logs_once_that_its_first_launches_compile_kernels(launched, caplog):
    caplog.set_level("INFO")
    triton_launch.announce_compilation.cache_clear()
    x, gpu = torch.empty(64), SimpleNamespace(type="cuda", index=0)
    for columns in (7, 8, 8):
        plan = triton_launch.Plan(_copy_kernel, (1,), (0, columns), {"N": 64})
        triton_launch.launch(plan, gpu, x, x)
    assert [triton.knobs.cache.dir in record.getMessage() for record in caplog.records] == [True]


def test_every_thread_binds_the_cuda_context_of_a_device(launched):
    def launch():
        x = torch.empty(16)
        for _ in range(2):
            plan = triton_launch.Plan(_copy_kernel, (1,), (0, 1), {"N": 16})
            triton_launch.launch(plan, SimpleNamespace(type="cuda", index=0), x, x)

    for _ in range(2):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert [entry == ("bind", 0) for entry in launched] == 2 * [True, False, False]


def test_the_interpreter_needs_no_cuda_context():
    calls = []

    class Kernel:
        fn, arg_names = None, ["n"]

        def __getitem__(self, grid):
            return lambda *given, **constants: calls.append((grid, given, constants))

    with mock.patch.object(torch.cuda, "device", side_effect=AssertionError):
        plan = triton_launch.Plan(Kernel(), (1, 2), (5,), {})
        triton_launch.launch(plan, torch.device("cpu"))
    assert calls == [((1, 2, 1), (5,), {})]


def test_a_tensor_descriptor_describes_one_aligned_tensor(monkeypatch):
    descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    monkeypatch.setattr(triton_launch, "hardware_of", lambda _: "sm_90")
    rows, weights = torch.zeros(40, 32), torch.zeros(2, 16, 32)
    for x in (weights, weights.clone()):
        (rows_read,), (read,), product = triton_launch.operands("linear", 40, [rows], [x])
        block = [1, product.tile.block_n, product.tile.block_k]
        expected = descriptor(x, list(x.shape), list(x.stride()), block)
        assert rows_read.base is rows and read.base is x
        assert vars(read) | {"base": None} == vars(expected) | {"base": None}
        _, (read,), _ = triton_launch.operands("dx", 40, [torch.zeros(40, 16)], [x.mT])
        assert read.base.mT is not None and read.shape == list(x.shape)
    shifted = torch.zeros(40 * 32 + 1)[1:].view(40, 32)
    for case in ([shifted], [weights]), ([torch.zeros(40, 30)], [torch.zeros(2, 16, 30)]):
        *read, _ = triton_launch.operands("linear", 40, *case)
        assert read[0] is case[0]
    misaligned = [shifted[:32].view(2, 16, 32)]
    assert triton_launch.operands("linear", 40, [rows], misaligned)[1] is misaligned
