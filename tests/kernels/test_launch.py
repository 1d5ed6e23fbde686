"""Launches of kernels: one function, and one CUDA context per thread."""

import ast
import contextlib
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

import fairseq_tutel
from fairseq_tutel import kernels

triton_launch = pytest.importorskip("fairseq_tutel.kernels.triton_launch")


def launches(path: Path) -> list[str]:
    """Return the calls kernel[grid](…), kernel.run(…) and kernel.warmup(…) of a source file."""
    called = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    are = [isinstance(f, ast.Subscript) or getattr(f, "attr", "") in ("run", "warmup") for f in called]
    names = [ast.unparse(f.value) for f, is_launch in zip(called, are, strict=True) if is_launch]
    return [name for name in names if name.endswith("kernel")]


def test_one_function_launches_every_kernel():
    folders = Path(kernels.__file__).parent, Path(fairseq_tutel.__file__).parent
    found = {path.name for folder in folders for path in folder.rglob("*.py") if launches(path)}
    assert found == {"triton_launch.py"}


class Kernel:
    """A compiled kernel that records its launch."""

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *given, **constants: self.calls.append(("launch", grid, given, constants))


def test_the_first_launch_of_a_thread_on_a_device_binds_its_context(monkeypatch):
    calls = []

    @contextlib.contextmanager
    def device(index):
        calls.append(("enter", index))
        yield
        calls.append(("exit", index))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: calls.append(("bind", device.index)))
    kernel = Kernel(calls)
    first, second = (torch.device("cuda", index) for index in range(2))

    def launch_thrice() -> None:
        for where in (first, first, second):
            triton_launch.launch(kernel, (3,), where, "x", BLOCK=16)

    def expected(index: int, binds: bool) -> list:
        launched = ("launch", (3,), ("x",), {"BLOCK": 16})
        return [("enter", index), *[("bind", index)] * binds, launched, ("exit", index)]

    for _ in range(2):  # the second thread launches a kernel that the first one has loaded
        thread = threading.Thread(target=launch_thrice)
        thread.start()
        thread.join()
    once = [*expected(0, True), *expected(0, False), *expected(1, True)]
    assert calls == 2 * once


def test_the_interpreter_needs_no_context():
    calls = []
    with mock.patch.object(torch.cuda, "device", side_effect=AssertionError):
        triton_launch.launch(Kernel(calls), (1, 2), torch.device("cpu"), 5)
    assert calls == [("launch", (1, 2), (5,), {})]
