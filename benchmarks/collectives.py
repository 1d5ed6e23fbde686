"""Time collectives between ranks of one host: plans in shared memory, plans with messages, and gloo.

    OMP_NUM_THREADS=1 python -m benchmarks.collectives --json out.json

Ranks are processes of this machine. All variants of a configuration run alternately in the same processes:
after a barrier, a variant is called a few times. Its time is the slowest rank's time per call. Before the
timing, every variant's result is compared with gloo's. Bytes are the larger of a rank's input and output,
with at least one number per rank.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.command import parser_of, run, shown
from benchmarks.machine import facts
from benchmarks.output import BadOption, Report, Row
from benchmarks.timing import against
from fairseq_tutel.plans.executors.one_sided import OneSided
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators import GENERATORS, make, usual

BASE = "gloo"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (8, 64, 512, 4096, 32768, 262144, 2097152, 16777216, 67108864)
EXECUTORS = {"plan_shm": OneSided, "plan_p2p": TwoSided}
# Seconds of a turn, estimated with the slowest variant; maximum calls in a turn; minimum number of turns.
TURN_SECONDS, MOST_CALLS, LEAST_ROUNDS = 0.01, 50, 5

Call = Callable[[], object]
# torch 2.13 renamed them.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def main(words: list[str] | None = None) -> int:
    """Run the requested measurements; return the exit status."""
    parser = parser_of("collectives", __doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="how many")
    parser.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), help="which"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of a rank")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for a collective of a size and number of ranks"
    )
    parser.add_argument(
        "--all-plans", action="store_true", help="every plan by name in shared memory; else the usual one"
    )
    return run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    if min(options.ranks) < 2 or min(options.sizes) < 1:
        raise BadOption("--ranks has a number below 2 or --sizes one below 1; give that or more.")
    if options.quick:
        options.sizes, options.seconds = [8, 4096], 0.0
    machine = facts(torch.device("cpu"), torch.float32)
    report = Report("collectives", BASE, machine, shown(options), options.json)
    for ranks in options.ranks:
        for name, described, rows in _of_ranks(ranks, options):
            report.add(name, described, rows)
    report.finish()
    return int(any(row["status"] == "wrong" for row in report.rows))


def _of_ranks(ranks: int, options: argparse.Namespace) -> Iterator[tuple[str, Row, list[Row]]]:
    """Start a process for each rank; yield the name, the properties and the rows of each configuration."""
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory(prefix="collectives-") as folder:
        here, there = context.Pipe(duplex=False)
        words = (ranks, f"file://{folder}/store", there, options)
        processes = [
            context.Process(target=_rank, args=(rank, *words), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        there.close()
        try:
            while (found := here.recv()) is not None:
                yield found
        except EOFError:
            raise SystemExit("A rank failed; its error is above.") from None
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _rank(rank: int, ranks: int, store: str, results: Connection, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store, limit, world_size=ranks, rank=rank)
    if rank:
        results.close()
    programs: dict[tuple[str, str], Any] = {}
    try:
        for collective, size in product(options.collectives, options.sizes):
            name = f"{collective}, {ranks} ranks, {size} B"
            described = {"collective": collective, "ranks": ranks, "bytes": size}
            rows = _configuration(collective, ranks, size, options, programs)
            if rank == 0:
                results.send((name, described, rows))
        if rank == 0:
            results.send(None)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _configuration(
    collective: str, ranks: int, size: int, options: argparse.Namespace, programs: dict[Any, Any]
) -> list[Row]:
    """Return a row for each variant; on rank 0, the rows have the results of all ranks."""
    made, notes = {}, {BASE: ""}
    for executor, plan in _plans(collective, ranks, size, options.all_plans):
        note = plan.name.split()[0]
        way = f"{executor} {note}" if options.all_plans else executor
        if (executor, plan.digest) not in programs:
            programs[executor, plan.digest] = EXECUTORS[executor](plan, None)
        made[way], notes[way] = programs[executor, plan.digest], note
    ways, out, wanted, num_bytes = _ways(collective, ranks, size, made)
    rows: list[Row] = []
    for way in [each for each in ways if each != BASE]:
        out.fill_(-1)
        ways[way]()
        is_wrong = torch.tensor(float(not torch.equal(out, wanted)))
        dist.all_reduce(is_wrong)
        if is_wrong:
            rows.append({"variant": way, "status": "wrong", "reason": "another result than gloo's"})
            del ways[way]
    out.zero_()  # zeros, so that sums do not grow from call to call
    for way, row in against(_times(ways, options.seconds), BASE).items():
        rate = {"rate": num_bytes / row["seconds"], "rate_unit": "B/s"}
        rows.append({"variant": way, "status": "ok", "note": notes[way], **row, **rate})
    return rows


def _ways(
    collective: str, ranks: int, size: int, programs: dict[str, Any]
) -> tuple[dict[str, Call], Tensor, Tensor, int]:
    """Return the variants of a collective of equal shards, their output, gloo's output, and the bytes."""
    shard = max(1, size // 4 // (1 if collective == "all_reduce" else ranks))
    large = shard if collective == "all_reduce" else shard * ranks
    before = shard if collective == "all_gather" else large
    after = shard if collective == "reduce_scatter" else large
    # Integers: their sums are equal in any order.
    own = (torch.arange(before) % 251 + dist.get_rank()).float()
    out = torch.empty(after)
    wanted = own.clone() if collective == "all_reduce" else torch.empty(after)
    _by_gloo(collective, wanted, own)
    ways: dict[str, Call] = {BASE: partial(_by_gloo, collective, out, own)}
    ways |= {way: partial(_by_plan, program, own, out, shard) for way, program in programs.items()}
    return ways, out, wanted, large * 4


def _plans(collective: str, ranks: int, num_bytes: int, is_all: bool) -> Iterator[tuple[str, Plan]]:
    if not is_all:
        for executor in EXECUTORS:
            for plan in usual(collective, ranks):
                if plan.min_bytes <= num_bytes <= (plan.max_bytes or num_bytes):
                    yield executor, plan
        return
    for name, generator in GENERATORS.items():
        if collective in generator.collectives:
            yield "plan_shm", make(name, collective, ranks)


def _by_plan(program: Any, own: Tensor, out: Tensor, shard: int) -> None:
    program.start(own, out, shard).wait()


def _by_gloo(collective: str, out: Tensor, own: Tensor) -> None:
    if collective == "all_reduce":
        dist.all_reduce(out)
    elif collective == "all_gather":
        _all_gather(out, own)
    elif collective == "reduce_scatter":
        _reduce_scatter(out, own)
    else:
        dist.all_to_all_single(out, own)


def _times(ways: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Return the slowest rank's seconds in every turn, for each variant."""
    first = torch.tensor([_turn(call, 1) for call in ways.values()])
    for number, call in enumerate(ways.values()):
        first[number] = min(first[number], _turn(call, 1))
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    calls = [min(MOST_CALLS, max(1, int(TURN_SECONDS / each))) for each in first.tolist()]
    took = sum(n * each for n, each in zip(calls, first.tolist(), strict=True))
    rounds = max(LEAST_ROUNDS, min(1000, int(seconds / took))) if seconds else 2
    times = torch.empty(rounds, len(ways))
    names = list(ways)
    for turn in range(rounds):
        start = turn % len(names)
        order = [*range(start, len(names)), *range(start)]
        for number in order[:: -1 if turn % 2 else 1]:
            times[turn, number] = _turn(ways[names[number]], calls[number])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return {name: times[:, number].tolist() for number, name in enumerate(names)}


def _turn(call: Call, calls: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    sys.exit(main())
