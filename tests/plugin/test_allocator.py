"""After `keep_freed_memory`, the allocator keeps freed memory, so new tensors cause few page faults."""

import subprocess
import sys

import pytest
import torch

COUNT = """
import resource
import torch
import fairseq_tutel as ft

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**24)  # 64 MiB: more than glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
by_default, kept = faults(), ft.keep_freed_memory()
faults()
print(by_default, faults(), kept)
"""


@pytest.mark.skipif(
    torch.cuda.is_available() or not sys.platform.startswith("linux"), reason="not run: a CPU's"
)
def test_calling_keep_freed_memory_reduces_page_faults():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    by_default, after, kept = done.stdout.split()
    if kept == "False":
        pytest.skip("not run: another C library than glibc")
    assert int(by_default) >= 8, "each tensor is mapped anew, in large pages at least"
    assert int(after) < int(by_default) / 4
