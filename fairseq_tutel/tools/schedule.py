"""schedule: make a plan of trees for a network, as fast as any can be, and say why none is faster.

TOPOLOGY is a file, as --network writes one, or a name: dgx_a100:2 is two boxes. The optimum, its cut and
the trees are ForestColl's; others are compared by their load of the busiest link. More: docs/scaling.md.
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
from fairseq_tutel.plans.forestcoll.all_to_all_bounds import cut_bound, linear_program
from fairseq_tutel.plans.forestcoll.forest import Forest, grow_for
from fairseq_tutel.plans.forestcoll.optimum import names
from fairseq_tutel.plans.format import COLLECTIVES
from fairseq_tutel.plans.format import to_json as plan_to_json
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plans.generators.forest import forest as plan_of
from fairseq_tutel.tools.arguments import needing, refuse_output, writing
from fairseq_tutel.tools.schedule_figure import PLOTS, draw

MADE = tuple(name for name in COLLECTIVES if name != "all_to_all")
ROOTED = ("broadcast", "reduce")
# Smaller messages are slower than their bytes.
CHUNK_BYTES = 256 * 1024
MOST = {"trees": 65536, "slices": 1024}
# More GPUs than this get lines of progress; more than the limit would take longer than a few minutes.
QUICK, MOST_GPUS = 64, 256
EVERY = 5.0  # seconds
# Of a cut's vertices, by name.
NAMED = 4


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "schedule", help="make the fastest plan of a collective for a network", description=__doc__
    )
    known = ", ".join(f"{key}:{usage}" for key, (usage, _) in NETWORKS.items())
    parser.add_argument("topology", metavar="TOPOLOGY", help=f"FILE.json or one of {known}")
    parser.add_argument(
        "--collective", default="all_gather", help=f"one of {', '.join(MADE)} [all_gather]"
    )
    text = "trees of every root [the fewest that cost at most 5 %% over the optimum]"
    parser.add_argument("--trees", type=int, metavar="K", help=text)
    text = "of a shard: no more trees than leave 256 KiB to each [any]"
    parser.add_argument("--bytes", type=int, metavar="N", help=text)
    text = "of a shard in the plan, one behind the other along the trees: more and smaller messages [1]"
    parser.add_argument("--slices", type=int, default=1, metavar="P", help=text)
    parser.add_argument("--root", type=int, metavar="RANK", help="of broadcast and reduce [0]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan here")
    parser.add_argument("--network", type=Path, metavar="FILE", help="write the topology here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw it here: {', '.join(PLOTS)}"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print what the command line asks for."""
    outputs = {
        "--output": arguments.output,
        "--network": arguments.network,
        "--plot": arguments.plot,
    }
    written = {flag: path for flag, path in outputs.items() if path}
    for flag, path in written.items():
        refuse_output(path, flag=flag)
        if flag != "--plot" and path.suffix != ".json":
            raise ValueError(f"{flag} is {path}; end it in .json.")
    if arguments.output and arguments.output == arguments.network:
        raise ValueError(f"--output and --network are both {arguments.output}; give two files.")
    if arguments.plot and arguments.plot.suffix not in PLOTS:
        raise ValueError(f"--plot is {arguments.plot}; end it in one of {', '.join(PLOTS)}.")
    collective = arguments.collective
    if collective not in MADE:
        raise ValueError(f"--collective is {collective}; give one of {', '.join(MADE)}.")
    for key in ("trees", "bytes", "slices"):
        value = getattr(arguments, key)
        if value is not None and value < 1:
            raise ValueError(f"--{key} is {value}; give a number of at least 1.")
        if value is not None and value > MOST.get(key, value):
            raise ValueError(f"--{key} is {value}; give no more than {MOST[key]}.")
    network = find(arguments.topology)
    root = arguments.root
    if collective in ROOTED:
        root = root or 0
        if not 0 <= root < network.ranks:
            raise ValueError(f"--root is {root}; give one of the ranks 0 to {network.ranks - 1}.")
    elif root is not None:
        raise ValueError(f"--root is {root}, which {collective} has none of; leave it out.")
    most = None if arguments.bytes is None else max(1, arguments.bytes // CHUNK_BYTES)
    if network.ranks > MOST_GPUS:
        raise ValueError(
            f"{arguments.topology} has {network.ranks} GPUs; give a network of at most {MOST_GPUS}."
        )
    adding, handing = grow_for(
        network, collective, root, arguments.trees, most, tell=_progress(network)
    )
    forest = handing or adding
    assert forest, "it adds up or hands out"
    text = "\n\n".join(_page(network, collective, forest))
    if arguments.output:
        plan = plan_to_json(plan_of(collective, adding, handing, slices=arguments.slices))
        with writing(arguments.output) as file:
            file.write_text(json.dumps(plan) + "\n", encoding="utf-8")
    if arguments.network:
        with writing(arguments.network, "--network") as file:
            file.write_text(json.dumps(to_json(network)) + "\n", encoding="utf-8")
    if arguments.plot:
        with needing("--plot", "plan"), writing(arguments.plot, "--plot") as file:
            draw(forest, f"{collective}, {network.name}", file, sums=handing is None)
    print(printable(text))
    for path in written.values():
        print(f"wrote {path}")


def _progress(network: Network) -> Callable[[str], None]:
    """Return what prints progress on stderr, at most a line in `EVERY` seconds, for large networks."""
    last = monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if network.ranks > QUICK and monotonic() - last >= EVERY:
            last = monotonic()
            print(f"schedule: {text}", file=sys.stderr, flush=True)

    return tell


def _page(network: Network, collective: str, forest: Forest) -> Iterator[str]:
    """Yield what there is to say, in parts."""
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
    least = "of a reduce-scatter and then an all-gather" if times == 2 else "optimum"
    move = "come in sums to" if collective in ("reduce", "reduce_scatter") else "leave"
    yield (
        f"{collective}, {least}: T* = {optimum} (bytes of a shard / {unit}), "
        f"algbw {bandwidth(optimum)} {unit}\n"
        f"cut: {best.narrow[0]} shard(s) {move} {_side(network, best.cut)} over {best.narrow[1]} {unit}"
    )
    yield (
        f"trees: k = {share.trees} of each root, in {len(forest.trees)} shapes, depth {forest.depth}; "
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
    """Return bounds of all-to-alls beside two of them."""
    bound, cut, is_all = cut_bound(network)
    exact, missing = float(bound), ""
    try:
        with needing("the linear program", "plan"):
            exact = linear_program(network)
    except ValueError as error:
        missing = f"\n\n{error}"
    tried = "" if is_all else ", of ranks and hosts alone"
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
    """Yield other schedules of a collective, and what they take of a shard's byte.

    Args:
        network: the links.
        collective: any but all_to_all.
        root: of broadcast and reduce.
    """
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
    """Return a set of vertices in words, by the fewer: those that are in it, or not."""
    ranks = (1 << network.ranks) - 1
    inside, outside = names(network, cut & ranks), names(network, ranks & ~cut)
    words, listed = ("", inside) if len(inside) <= len(outside) else ("all but ", outside)
    if len(listed) > NAMED:
        listed = [*listed[:NAMED], f"… ({len(listed)} GPUs)"]
    return words + ", ".join(listed)
