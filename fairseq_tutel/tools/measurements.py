"""Measures the speed of memory, experts, gate and links for the tool `tune`."""

import argparse
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.experts import grouped_linear
from fairseq_tutel.parallel.collectives import all_reduce, all_to_all, barrier
from fairseq_tutel.parallel.groups import Topology, make_topology
from fairseq_tutel.parallel.machine import Link, Machine, typical
from fairseq_tutel.parallel.rendezvous import own_gpu, ranks_per_node

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ROW_FLOATS = 256  # numbers in a row of 1 KiB
_COPIED_BYTES = 2**26


class Row(NamedTuple):
    """A measurement of one linear all-to-all: its nodes, ranks per node, size and time."""

    nodes: int
    local: int
    bytes_per_rank: int  # the size of the input, including the rank's own share
    seconds: float


def measured(arguments: argparse.Namespace) -> tuple[Machine, list[Row]] | None:
    """Measure the hardware; return its profile and the times of all-to-alls, or None on ranks above 0.

    Under torchrun, all ranks must call this function. With one rank, links have typical speeds.

    Args:
        arguments: the numbers of the tool `tune`, and `dtype`.

    Raises:
        ValueError: the ranks cannot hold the experts, or the measurements do not determine the links.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        machine = _machine(arguments, device, Topology())
    else:
        if device.type == "cuda":
            device = torch.device("cuda", own_gpu())
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            topology = make_topology([arguments.experts], ranks_per_node=ranks_per_node())
            if topology.expert_group is None:
                raise ValueError(
                    f"--experts is {arguments.experts}, which has no divisor in common with the "
                    f"{topology.world_size} ranks, so no row would be sent; give a multiple "
                    "of the number of ranks."
                )
            machine = _machine(arguments, device, topology)
            rows = list(_exchanges(arguments, device, topology))
        finally:
            dist.destroy_process_group()
        if topology.rank > 0:
            return None
        intra, inter = [row for row in rows if row.nodes == 1], [row for row in rows if row.local == 1]
        machine = replace(
            machine,
            launch_s=0.0,  # a part of the latencies
            intra=link_of(intra) if intra else machine.intra,
            inter=link_of(inter) if inter else machine.inter,
        )
    return machine, rows


def link_of(rows: Sequence[Row]) -> Link:
    """Return the latency and speed of a link from the shortest and the longest all-to-all over it."""
    first, last = rows[0], rows[-1]
    others = first.nodes * first.local - 1
    short, long = (row.bytes_per_rank * others / (others + 1) for row in (first, last))
    if last.seconds <= first.seconds:
        raise ValueError(
            "the measured all-to-alls do not take longer with more bytes; measure larger messages."
        )
    bytes_per_s = (long - short) / (last.seconds - first.seconds)
    return Link(max(0.0, first.seconds - short / bytes_per_s) / others, bytes_per_s)


def _machine(arguments: argparse.Namespace, device: torch.device, topology: Topology) -> Machine:
    """Measure the speed of memory, experts and gate. The returned profile has typical link speeds."""
    if device.type == "cuda":
        name = gpu = torch.cuda.get_device_name(device)
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        name, gpu = platform.machine(), None
        pages = os.sysconf("SC_PHYS_PAGES")
        memory = os.sysconf("SC_PAGE_SIZE") * pages / (ranks_per_node() or 1)
    dtype = _DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    rows, weights = arguments.tokens * arguments.top_k, arguments.model_dim * arguments.hidden_dim
    source = torch.ones(_COPIED_BYTES // 4096, 1024, device=device)
    order = torch.randperm(len(source), device=device)
    copy_s = _time(lambda: source.index_select(0, order), arguments, device)
    experts_s = _time(_experts(arguments, device, dtype, topology), arguments, device)
    # An fp32 product of an expert's size, because the gate's own product would measure kernel launches.
    x = torch.randn(arguments.tokens, arguments.model_dim, device=device)
    weight = torch.randn(arguments.model_dim, arguments.hidden_dim, device=device)
    gate_s = _time(lambda: x @ weight, arguments, device)
    return replace(
        typical(gpu),
        name=name,
        memory_bytes_per_s=2 * _COPIED_BYTES / copy_s,
        flops_per_s=6 * rows * weights / experts_s,
        gate_flops_per_s=2 * arguments.tokens * weights / gate_s,
        memory_bytes=memory,
    )


def _experts(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype, topology: Topology
) -> Callable[[], object]:
    """Return a function that runs the forward and backward pass of one projection of all local experts."""
    count = arguments.experts // topology.expert_parallel_size
    rows = arguments.tokens * arguments.top_k
    counts = [rows // count + (i < rows % count) for i in range(count)]
    groups = Groups.of_host(counts, device)
    rows_RD = torch.randn(rows, arguments.model_dim, device=device).to(dtype).requires_grad_()
    weight = torch.randn(count, arguments.hidden_dim, arguments.model_dim, device=device)
    weight = weight.to(dtype).requires_grad_()

    def step() -> None:
        out = grouped_linear(rows_RD, groups, weight)
        torch.autograd.grad(out, (rows_RD, weight), out.detach())

    return step


def _exchanges(arguments: argparse.Namespace, device: torch.device, topology: Topology) -> Iterator[Row]:
    """Measure the times of all-to-alls of several sizes in the EP group.

    On a grid of nodes, also measure those within a node and those between nodes.
    """
    grid, group, ranks_of_group = topology.grid, topology.expert_group, topology.expert_parallel_size
    # A group over several nodes that is not a grid has one rank in each node.
    one_each = (ranks_per_node() or topology.world_size) == 1
    shape = (grid.nodes, grid.local) if grid else (ranks_of_group, 1) if one_each else (1, ranks_of_group)
    cases: list[tuple[int, int, Any]] = [(*shape, group)]
    if grid:
        cases += [(1, grid.local, grid.node_group), (grid.nodes, 1, grid.rail_group)]
    for nodes, local, ranks in cases:
        count = nodes * local  # number of rows: one per rank, then four times as many in each step
        while 4 * _ROW_FLOATS * count <= arguments.max_mib * 2**20:
            rows_RD = torch.zeros(count, _ROW_FLOATS, device=device)
            seconds = _time(partial(all_to_all, rows_RD, "the measurement", ranks), arguments, device)
            yield Row(nodes, local, rows_RD.nbytes, seconds)
            count *= 4


def _time(step: Callable[[], object], arguments: argparse.Namespace, device: torch.device) -> float:
    """Time a function; return the slowest rank's seconds in the fastest repeat. All ranks must join."""
    times = []
    for _ in range(arguments.repeats + 1):
        barrier()
        _finish(device)
        start = perf_counter()
        step()
        _finish(device)
        times.append(perf_counter() - start)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    all_reduce(slowest, "the measurement", op=dist.ReduceOp.MAX)
    return float(slowest.min())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
