"""The tool `schedule` makes the fastest collective plan for a network, and prints the network's bottleneck.

NETWORK is a file in the format of --output-network, or a name, such as dgx_a100:2 for two nodes. The
algorithm ForestColl computes a plan that sends data along trees. The bottleneck is a cut: a set of vertices
whose links to all other vertices limit the speed. Details: docs/scaling.md.
"""

import argparse
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from fairseq_tutel.files import printable
from fairseq_tutel.plans.files import write
from fairseq_tutel.plans.forestcoll.forest import Forest, grow
from fairseq_tutel.plans.forestcoll.max_flow import members
from fairseq_tutel.plans.generators.forest import plan_of
from fairseq_tutel.plans.network import NETWORKS, Network, find, to_json
from fairseq_tutel.tools.arguments import at_least, refuse_output, writing
from fairseq_tutel.tools.parser import add_output

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# For networks with more GPUs, the algorithm takes more than a few minutes.
MOST_GPUS = 256
# Largest number of GPUs of a cut that the output names.
NAMED = 4


def add_to(tools: Any) -> None:
    """Add the tool `schedule` as a subcommand of `python -m fairseq_tutel`."""
    example = "dgx_a100:2 --collective all_reduce --output plan.json"
    parser = tools.add_parser("schedule", description=__doc__, example=example)
    known = ", ".join(f"{key}:{usage}" for key, (usage, _) in NETWORKS.items())
    parser.add_argument("network", metavar="NETWORK", help=f"FILE.json or one of {known}")
    text = "collective of the plan [all_gather]"
    parser.add_argument("--collective", default="all_gather", choices=COLLECTIVES, help=text)
    text = "number of trees per root [the smallest number within 5 %% of the optimum]"
    parser.add_argument("--trees", type=at_least(1, 65536), metavar="K", help=text)
    text = "number of slices of a shard that are sent one after another, as smaller messages [1]"
    parser.add_argument("--slices", type=at_least(1, 1024), default=1, metavar="P", help=text)
    add_output(parser, "write the plan to this file")
    text = "write the network to this file"
    parser.add_argument("--output-network", type=Path, metavar="FILE", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Make a collective plan, write the plan to a file, and print its time, trees and cut."""
    _refuse(arguments)
    collective, network = arguments.collective, find(arguments.network)
    if network.ranks > MOST_GPUS:
        raise ValueError(
            f"{arguments.network} has {network.ranks} GPUs; give a network of at most {MOST_GPUS}."
        )
    forest = grow(network, arguments.trees)
    if arguments.output:
        with writing(arguments.output) as file:
            write(plan_of(collective, forest, slices=arguments.slices), file)
    if arguments.output_network:
        with writing(arguments.output_network, "--output-network") as file:
            file.write_text(json.dumps(to_json(network)) + "\n", encoding="utf-8")
    print(printable("\n\n".join(_page(network, collective, forest))))
    for path in filter(None, (arguments.output, arguments.output_network)):
        print(f"wrote {path}")


def _refuse(arguments: argparse.Namespace) -> None:
    outputs = {"--output": arguments.output, "--output-network": arguments.output_network}
    for flag, path in outputs.items():
        if path:
            refuse_output(path, overwrite=arguments.overwrite, flag=flag)
            if path.suffix != ".json":
                raise ValueError(f"{flag} is {path}; give a name that ends with .json.")
    if arguments.output and arguments.output == arguments.output_network:
        raise ValueError(f"--output and --output-network are both {arguments.output}; give two files.")


def _page(network: Network, collective: str, forest: Forest) -> Iterator[str]:
    """Yield the paragraphs that the tool `schedule` prints."""
    unit, times = network.unit, 1 + (collective == "all_reduce")
    best, share = forest.best, forest.share
    optimum, seconds = times * best.seconds, times * share.seconds

    def bandwidth(seconds: Fraction) -> str:
        return f"algbw {float(network.ranks / seconds):.6g} {unit}"

    yield (
        f"{network.name}: {network.ranks} GPUs, {len(network.switches)} switches, "
        f"{len(network.links)} links; network {network.digest}"
    )
    least = "optimum of a reduce-scatter and an all-gather" if times == 2 else "optimum"
    move = "arrive as sums in" if collective == "reduce_scatter" else "leave"
    yield (
        f"{collective}, {least}: T* = {optimum} (bytes of a shard / {unit}), {bandwidth(optimum)}\n"
        f"cut: {best.narrow[0]} shard(s) {move} {_gpus(network, best.cut)} over {best.narrow[1]} {unit}"
    )
    yield (
        f"trees: k = {share.trees} per root, {len(forest.trees)} different ones, depth {forest.depth}; "
        f"U = {share.stretch} trees a {unit}; T = {seconds}, {bandwidth(seconds)}, "
        f"{100 * float(seconds / optimum - 1):.1f} % over the optimum"
    )


def _gpus(network: Network, cut: int) -> str:
    """Return the names of the GPUs in a cut; if there are many, only the first names and the number."""
    ranks = [network.vertices[vertex] for vertex in members(cut) if vertex < network.ranks]
    return ", ".join(ranks[:NAMED]) + (f", … ({len(ranks)} GPUs)" if len(ranks) > NAMED else "")
