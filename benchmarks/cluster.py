"""`python -m benchmarks.cluster`: measure collectives with trees, a ring and gloo over slow emulated links.

Every GPU and switch of a network is a Linux network namespace. Every link is a veth pair with a limited
bandwidth in both directions (`tc … tbf`). Messages are routed over the fastest path. "Predicted" is the
time by the formula of docs/plans.md. "Busiest" is the time of the busiest link, a lower bound for an
all_gather. The benchmark needs Linux and root.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import command
from benchmarks.machine import facts
from benchmarks.output import BadOption, Report, Row
from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.forestcoll.forest import grow
from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators.forest import plan_of
from fairseq_tutel.plans.generators.named import ring
from fairseq_tutel.plans.network import Network, find, from_json, routed, to_json, ways

ROOT = Path(__file__).resolve().parents[1]
BASE, SLICES, INTERFACE, MOST_VERTICES = "gloo", 4, "eth0", 200
COLLECTIVES = ("all_gather", "all_reduce")
NETWORKS = ("boxes:2x4:10:1", "cluster:2x4:10:1")
MTU = 9000  # A fifth of the usual number of packets, so the kernel leaves more CPU time to the ranks.
QUEUE_BYTES, BURST_BYTES = 64_000_000, 20_000
RESEND = "10s"  # longer than the time that any packet spends in a queue
Form = Callable[[Tensor, Tensor], object]


def main(words: list[str] | None = None) -> int:
    """Measure on each network; return 0 even if this machine cannot emulate networks."""
    parser = command.parser_of("cluster", "Measure collectives on an emulated cluster.")
    add = parser.add_argument
    add("--networks", nargs="+", default=list(NETWORKS), help="names of the tool schedule, or FILE.json")
    add("--unit-mbit", type=command.positive, default=16, help="of a link of bandwidth 1, in Mbit/s")
    add("--shard-kib", type=command.positive, default=512, help="of a rank; an all_reduce has N of them")
    add("--repeats", type=command.positive, default=3, help="timed calls of each")
    add("--limit-s", type=float, default=300, help="a network's ranks end after so many seconds")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    if options.quick:
        options.networks, options.shard_kib, options.repeats = ["boxes:2x1:10:1"], 16, 1
    networks = [find(name) for name in options.networks]
    if any(len(network.vertices) > MOST_VERTICES for network in networks):
        raise BadOption(f"--networks has one of more than {MOST_VERTICES} vertices; give a smaller one.")
    machine = facts(torch.device("cpu"), torch.float32)
    report = Report("cluster", BASE, machine, command.shown(options), options.json)
    for network in networks:
        try:
            with wired(network, options.unit_mbit):
                rows = _run_ranks(network, options)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"no network can be made here: {getattr(error, 'stderr', '') or error}"
            rows = [{"variant": BASE, "status": "skipped", "reason": reason}]
        report.add(network.name, {}, rows)
    report.finish()
    return int(any(row["status"] == "failed" for row in report.rows))


def _namespace(vertex: int) -> str:
    return f"moe-cluster-{os.getpid()}-{vertex}"


def _address(vertex: int) -> str:
    return f"10.77.0.{vertex + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def wired(network: Network, unit_mbit: float) -> Iterator[None]:
    """Create namespaces for a network's vertices (r for rank r) and its links; remove them at the end.

    Raises:
        CalledProcessError: a command of ip or tc failed; the error has its stderr.
        OSError: the program ip or tc is not installed.
    """
    made = [_namespace(vertex) for vertex in range(len(network.vertices))]
    try:
        for vertex, name in enumerate(made):
            _ip("netns", "add", name)
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            _ip("netns", "exec", name, "sh", "-c", forward)
            # A bridge without ports has the address, so the address does not belong to any link.
            _ip("-n", name, "link", "add", INTERFACE, "type", "bridge")
            _ip("-n", name, "addr", "add", f"{_address(vertex)}/32", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
        for a, b in {(min(link[:2]), max(link[:2])) for link in network.links}:
            _ip("link", "add", *_end(a, b), "type", "veth", "peer", *_end(b, a))
            for vertex, other in ((a, b), (b, a)):
                _ip("-n", made[vertex], "link", "set", f"to{other}", "up")
        for link in network.links:
            rate = round(unit_mbit * link.bandwidth * 1e6)
            limits = ["rate", f"{rate}bit", "burst", str(max(BURST_BYTES, rate // 8000))]
            words = [
                "tc",
                "-n",
                made[link.source],
                "qdisc",
                "add",
                "dev",
                f"to{link.target}",
                "root",
                "tbf",
            ]
            words += [*limits, "limit", str(QUEUE_BYTES)]
            subprocess.run(words, check=True, capture_output=True, text=True)
        for rank in range(network.ranks):
            for vertex, hop in ways(network, rank).items():
                if vertex != rank:
                    way = ["via", _address(hop), "dev", f"to{hop}", "onlink", "src", _address(vertex)]
                    route = [f"{_address(rank)}/32", *way, "rto_min", RESEND]
                    _ip("-n", made[vertex], "route", "add", *route)
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _end(vertex: int, other: int) -> list[str]:
    return ["name", f"to{other}", "netns", _namespace(vertex), "mtu", str(MTU)]


def _run_ranks(network: Network, options: argparse.Namespace) -> list[Row]:
    """Run a process for every rank in its namespace; return their rows."""
    settings = {"network": to_json(network), **command.shown(options)}
    with TemporaryDirectory(prefix="cluster-") as folder:
        rows, log = Path(folder, "rows.jsonl"), Path(folder, "log")
        code = "from benchmarks.cluster import run_rank; run_rank()"
        processes = []
        try:
            for rank in range(network.ranks):
                variables = {
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(network.ranks),
                    "MASTER_ADDR": _address(0),
                    "MASTER_PORT": "29500",
                }
                words = ["ip", "netns", "exec", _namespace(rank), sys.executable, "-c", code]
                with log.open("ab") as file:
                    started = subprocess.Popen(
                        [*words, json.dumps(settings), str(rows)],
                        env={**os.environ, **variables},
                        stdout=file,
                        stderr=file,
                    )
                processes.append(started)
            end = time.monotonic() + options.limit_s
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            reason = f"a rank failed or --limit-s was over: {log.read_text()[-2000:]}"
            return [{"variant": BASE, "status": "failed", "reason": reason}]
        return [json.loads(line) for line in rows.read_text().splitlines()]


def run_rank() -> None:
    """Measure as one rank, given by torchrun's environment variables; rank 0 writes the rows to a file."""
    settings, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    network, shard = from_json(settings["network"]), 256 * settings["shard_kib"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings["limit_s"]))
    plain = {"ring": _by_plan(ring("all_gather", network.ranks))}
    alpha = median(_times("all_gather", 1, plain, 5)["ring"]) / network.ranks
    found = []
    for collective in COLLECTIVES:
        trees = grow(network)
        plans = {
            "forest": plan_of(collective, trees),
            f"in {SLICES} slices": plan_of(collective, trees, slices=SLICES),
            "ring": ring(collective, network.ranks),
        }
        forms = {
            BASE: partial(_by_gloo, collective),
            **{name: _by_plan(plan) for name, plan in plans.items()},
        }
        times = _times(collective, shard, forms, settings["repeats"])
        for name, seconds in times.items():
            row: Row = {"variant": f"{collective}, {name}", "status": "ok", "seconds": median(seconds)}
            if name in plans:
                row |= _predicted(network, plans[name], 4 * shard, settings["unit_mbit"], alpha)
                row["note"] = f"predicted {row['predicted']:.3g} s, busiest link {row['busiest']:.3g} s"
            found.append(row)
    if dist.get_rank() == 0:
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    dist.barrier()  # no rank exits while another rank still waits for a message
    dist.destroy_process_group()


def _predicted(
    network: Network, plan: Plan, shard_bytes: int, unit_mbit: float, alpha: float
) -> dict[str, float]:
    """Return the predicted seconds of a plan by its rounds, and by its busiest link.

    Args:
        network: the network with its links.
        plan: a plan for the ranks of the network.
        shard_bytes: size of each rank's input of an all_gather.
        unit_mbit: bandwidth in Mbit/s of a link whose bandwidth is 1 in the network.
        alpha: latency of a message in seconds.
    """
    size = shard_bytes * (1 if plan.collective == "all_gather" else network.ranks)
    report = check(plan)

    def seconds_per_byte(link: tuple[int, int]) -> float:
        return 8 / (1e6 * unit_mbit * network.matrix[link[0]][link[1]])

    by_rounds = replace(report, loads=tuple(routed(network, load) for load in report.loads))
    total = routed(network, report.bytes_of_link)
    return {
        "predicted": by_rounds.predicted(size, alpha, seconds_per_byte),
        "busiest": max(float(part) * size * seconds_per_byte(link) for link, part in total.items()),
    }


def _times(collective: str, shard: int, forms: dict[str, Form], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way to run the collective, on the slowest rank, after one warm-up call.

    Raises:
        RuntimeError: the collective has a wrong result.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    owners = torch.arange(ranks, dtype=torch.float32).repeat_interleave(shard)
    own, right = owners + rank, ranks * owners + sum(range(ranks))
    if collective == "all_gather":
        own, right = torch.full((shard,), float(rank)), owners
    out, took = torch.empty_like(right), torch.empty(repeats + 1, len(forms))
    for turn in range(repeats + 1):
        for number, (name, form) in enumerate(forms.items()):
            out.fill_(-1)
            dist.barrier()
            begin = time.perf_counter()
            form(own, out)
            took[turn, number] = time.perf_counter() - begin
            if not torch.equal(out, right):
                raise RuntimeError(f"{collective} by {name} gave a wrong result on rank {rank}.")
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return {name: took[1:, number].tolist() for number, name in enumerate(forms)}


def _by_plan(plan: Plan) -> Form:
    program = TwoSided(plan, None)
    return lambda own, out: program.start(own, out, min(own.numel(), out.numel())).wait()


def _by_gloo(collective: str, own: Tensor, out: Tensor) -> None:
    if collective == "all_gather":
        dist.all_gather_into_tensor(out, own)
        return
    out.copy_(own)
    dist.all_reduce(out)


if __name__ == "__main__":
    sys.exit(main())
