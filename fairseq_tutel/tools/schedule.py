"""schedule: make the fastest plan of a collective for a network, and show the cut that limits it.

TOPOLOGY is a file (--network writes one) or a name: dgx_a100:2 is two boxes. ForestColl gives the optimum,
its cut and the trees. Other schedules are compared by the load of the busiest link. More: docs/scaling.md.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from time import monotonic
from typing import Any

from fairseq_tutel.files.small import printable
from fairseq_tutel.planning.network import NETWORKS, Network, find, to_json
from fairseq_tutel.planning.traffic import busiest, routed, turned_rings
from fairseq_tutel.plans.files import write
from fairseq_tutel.plans.forestcoll.all_to_all_bounds import cut_bound, linear_program
from fairseq_tutel.plans.forestcoll.forest import Forest, grow_for
from fairseq_tutel.plans.forestcoll.max_flow import members
from fairseq_tutel.plans.format import COLLECTIVES
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plans.generators.forest import forest as plan_of
from fairseq_tutel.tools.arguments import needing, refuse_output, writing
from fairseq_tutel.tools.schedule_figure import PLOTS, draw

MADE = tuple(name for name in COLLECTIVES if name != "all_to_all")
ROOTED = ("broadcast", "reduce")
# The latency of smaller messages matters.
CHUNK_BYTES = 256 * 1024
MOST = {"trees": 65536, "slices": 1024}
# Networks of more than QUICK GPUs get progress lines; more than MOST_GPUS take more than a few minutes.
QUICK, MOST_GPUS = 64, 256
EVERY = 5.0  # seconds between progress lines
# How many vertices of a cut are named.
NAMED = 4


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "schedule", help="make the fastest plan of a collective for a network", description=__doc__
    )
    known = ", ".join(f"{key}:{usage}" for key, (usage, _) in NETWORKS.items())
    parser.add_argument("topology", metavar="TOPOLOGY", help=f"FILE.json or one of {known}")
    parser.add_argument("--collective", default="all_gather", help=f"one of {', '.join(MADE)} [all_gather]")
    text = "trees per root [the fewest that are within 5 %% of the optimum]"
    parser.add_argument("--trees", type=int, metavar="K", help=text)
    text = "bytes of a shard: limits the trees to shares of at least 256 KiB [any]"
    parser.add_argument("--bytes", type=int, metavar="N", help=text)
    text = "slices of a shard that follow each other along the trees: more and smaller messages [1]"
    parser.add_argument("--slices", type=int, default=1, metavar="P", help=text)
    parser.add_argument("--root", type=int, metavar="RANK", help="root of broadcast and reduce [0]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan to this file")
    parser.add_argument("--network", type=Path, metavar="FILE", help="write the topology to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw it to this file: {', '.join(PLOTS)}"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Make the plan, write the files and print the comparison."""
    outputs = {f"--{key}": getattr(arguments, key) for key in ("output", "network", "plot")}
    written: dict[str, Path] = {flag: path for flag, path in outputs.items() if path}
    _refuse(arguments, written)
    collective, network = arguments.collective, find(arguments.topology)
    root = _root(collective, arguments.root, network)
    if network.ranks > MOST_GPUS:
        raise ValueError(
            f"{arguments.topology} has {network.ranks} GPUs; give a network of at most {MOST_GPUS}."
        )
    most = None if arguments.bytes is None else max(1, arguments.bytes // CHUNK_BYTES)
    reducing, distributing = grow_for(
        network, collective, root, arguments.trees, most, log=_progress(network)
    )
    forest = distributing or reducing
    assert forest, "a collective reduces or distributes"
    text = "\n\n".join(_page(network, collective, forest))
    for flag, path in written.items():
        with needing(flag, "plan"), writing(path, flag) as file:
            if flag == "--output":
                plan = plan_of(collective, reducing, distributing, slices=arguments.slices)
                write(plan, file)
            elif flag == "--network":
                file.write_text(json.dumps(to_json(network)) + "\n", encoding="utf-8")
            else:
                draw(forest, f"{collective}, {network.name}", file, sums=distributing is None)
    print(printable(text))
    for path in written.values():
        print(f"wrote {path}")


def _refuse(arguments: argparse.Namespace, written: dict[str, Path]) -> None:
    for flag, path in written.items():
        refuse_output(path, flag=flag)
        endings = PLOTS if flag == "--plot" else (".json",)
        if path.suffix not in endings:
            one_of = "one of " * (len(endings) > 1)
            raise ValueError(f"{flag} is {path}; end it in {one_of}{', '.join(endings)}.")
    if arguments.output and arguments.output == arguments.network:
        raise ValueError(f"--output and --network are both {arguments.output}; give two files.")
    if arguments.collective not in MADE:
        raise ValueError(f"--collective is {arguments.collective}; give one of {', '.join(MADE)}.")
    for key in ("trees", "bytes", "slices"):
        value = getattr(arguments, key)
        if value is not None and value < 1:
            raise ValueError(f"--{key} is {value}; give a number of at least 1.")
        if value is not None and value > MOST.get(key, value):
            raise ValueError(f"--{key} is {value}; give at most {MOST[key]}.")


def _root(collective: str, root: int | None, network: Network) -> int | None:
    if collective in ROOTED:
        root = root or 0
        if not 0 <= root < network.ranks:
            raise ValueError(f"--root is {root}; give one of the ranks 0 to {network.ranks - 1}.")
    elif root is not None:
        raise ValueError(f"--root is {root}, but {collective} has no root; leave it out.")
    return root


def _progress(network: Network) -> Callable[[str], None]:
    """Return a function that prints progress of large networks on stderr, one line in `EVERY` seconds."""
    last = monotonic()

    def log(text: str) -> None:
        nonlocal last
        if network.ranks > QUICK and monotonic() - last >= EVERY:
            last = monotonic()
            print(f"schedule: {text}", file=sys.stderr, flush=True)

    return log


def _page(network: Network, collective: str, forest: Forest) -> Iterator[str]:
    """Yield the paragraphs of the output."""
    unit, times = network.unit, 1 + (collective == "all_reduce")
    shards = 1 if collective in ROOTED else network.ranks
    best, share = forest.best, forest.share

    def bandwidth(seconds: Fraction) -> str:
        return f"{float(shards / seconds):.3f}"

    optimum = times * best.seconds
    yield (
        f"{network.name}: {network.ranks} GPUs, {len(network.switches)} switches, "
        f"{len(network.links)} links; network {network.digest}"
    )
    least = "optimum of a reduce-scatter and an all-gather" if times == 2 else "optimum"
    move = "arrive as sums in" if collective in ("reduce", "reduce_scatter") else "leave"
    yield (
        f"{collective}, {least}: T* = {optimum} (bytes of a shard / {unit}), "
        f"algbw {bandwidth(optimum)} {unit}\n"
        f"cut: {best.narrow[0]} shard(s) {move} {_side(network, best.cut)} over {best.narrow[1]} {unit}"
    )
    yield (
        f"trees: k = {share.trees} per root, {len(forest.trees)} different ones, depth {forest.depth}; "
        f"U = {share.stretch} trees a {unit}; T = {times * forest.seconds}, "
        f"{100 * float(forest.seconds / best.seconds - 1):.1f} % over the optimum"
    )
    rows = [
        [name, f"{float(seconds / optimum):.3f}", bandwidth(seconds)]
        for name, seconds in (
            ("forest", times * forest.seconds),
            *others(network, collective, forest.root),
        )
    ]
    yield _table(rows, ["schedule", "over the optimum", f"algbw, {unit}"])
    yield _all_to_alls(network)


def _all_to_alls(network: Network) -> str:
    """Return bounds of an all-to-all, and the times of two plans."""
    bound, cut, is_all = cut_bound(network)
    exact, missing = float(bound), ""
    try:
        with needing("the linear program", "plan"):
            exact = linear_program(network)
    except ValueError as error:
        missing = f"\n\n{error}"
    tried = "" if is_all else ", of ranks and hosts only"
    found = {f"cut {_side(network, cut)}{tried}": float(bound)}
    if not missing:
        found["linear program"] = exact
    for name in ("linear", "two_hops"):
        found[name] = float(_takes(network, name, "all_to_all") * network.ranks)
    rows = [[name, f"{took:.6g}", f"{took / exact:.3f}"] for name, took in found.items()]
    over = "over the cut" if missing else "over the optimum"
    return _table(rows, ["all-to-all", f"bytes of a block / {network.unit}", over]) + missing


def _table(rows: list[list[str]], header: list[str]) -> str:
    with needing("schedule"):
        from tabulate import tabulate

    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def others(network: Network, collective: str, root: int | None) -> Iterator[tuple[str, Fraction]]:
    """Yield other schedules of a collective but all_to_all, and their times for a shard of one byte."""
    if collective in ROOTED:
        yield "tree", _takes(network, "tree", collective, root or 0)
        return
    shards = 1 if collective == "all_gather" else network.ranks
    yield "ring", shards * _takes(network, "ring", collective)
    turned = busiest(network, routed(network, turned_rings(network)))
    yield "turned rings", (1 + (collective == "all_reduce")) * turned
    if network.ranks.bit_count() == 1:
        doubling = _takes(network, "recursive_doubling", collective)
        yield "recursive doubling", shards * doubling


def _takes(network: Network, name: str, collective: str, root: int = 0) -> Fraction:
    sizes = {len(ranks) for ranks in network.hosts.values()}
    nodes = len(network.hosts) if len(sizes) == 1 else 1
    plan = make(name, collective, network.ranks, nodes=nodes, root=root)
    return busiest(network, routed(network, plan.bytes_sent))


def _side(network: Network, cut: int) -> str:
    """Return text for a set of vertices: its GPUs, or "all but" the others if these are fewer."""
    ranks = (1 << network.ranks) - 1
    inside, outside = (
        [network.vertices[vertex] for vertex in members(part)] for part in (cut & ranks, ranks & ~cut)
    )
    words, listed = ("", inside) if len(inside) <= len(outside) else ("all but ", outside)
    if len(listed) > NAMED:
        listed = [*listed[:NAMED], f"… ({len(listed)} GPUs)"]
    return words + ", ".join(listed)
