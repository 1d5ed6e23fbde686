"""Checks collective plans, and writes the usual collective plans for a number of ranks."""

import argparse
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from fairseq_tutel.files import printable
from fairseq_tutel.plans.checker import Report, check
from fairseq_tutel.plans.files import MOST, NAMED, find, write
from fairseq_tutel.plans.format import COLLECTIVES, Plan
from fairseq_tutel.plans.generators import GENERATORS, usual
from fairseq_tutel.plans.network import Network, routed
from fairseq_tutel.plans.network import find as network_of
from fairseq_tutel.tools.arguments import above_0, at_least, refuse_output, writing
from fairseq_tutel.tools.parser import add_output

# Largest number of links with equal bytes that `plan-check` lists.
SHOWN = 4
CHECK = """plan-check: check a collective plan and predict its time.

The predicted time is the latency of the longest chain of signals, plus the rounds' times on slowest links.
Details: docs/plans.md.
"""
USUAL = """plans: write the usual collective plans of N ranks into a folder, for --moe-collective-plans.

Each plan is the fastest one between ranks of one host for a range of message sizes. Details: docs/plans.md.
"""


def add_to(tools: Any) -> None:
    """Add the tools `plan-check` and `plans` to the command line."""
    example = "two_phase:all_reduce:4 --output all_reduce.json"
    parser = tools.add_parser("plan-check", description=CHECK, example=example)
    text = f"FILE.json, MSCCL's FILE.xml, or {NAMED}, where NAME is one of {', '.join(GENERATORS)}"
    parser.add_argument("plan", metavar="PLAN", help=text)
    text = "bytes of a rank's input, for the predicted time [1048576]"
    parser.add_argument("--bytes", type=at_least(1), default=1 << 20, metavar="N", help=text)
    text = "latency of a message between ranks, in microseconds [10]"
    parser.add_argument("--alpha-us", type=above_0, default=10.0, metavar="X", help=text)
    text = "bandwidth of each link, in GB/s [10]"
    parser.add_argument("--gb-s", type=above_0, default=10.0, metavar="X", help=text)
    text = "network instead of --gb-s: FILE.json or a name such as dgx_a100:2; transfers use fastest paths"
    parser.add_argument("--network", metavar="NETWORK", help=text)
    text = "write the plan to this file if it is correct: FILE.json, or FILE.xml for MSCCL"
    add_output(parser, text)
    parser.set_defaults(run=run_check)
    parser = tools.add_parser("plans", description=USUAL, example="2 4 --output plans")
    text = "number of ranks in a group"
    parser.add_argument("ranks", type=at_least(2, MOST), nargs="+", metavar="N", help=text)
    add_output(parser, "a new or empty folder for the plans", required=True, is_folder=True)
    parser.set_defaults(run=run_usual)


def run_usual(arguments: argparse.Namespace) -> None:
    """Make the usual collective plans for N ranks, and write them to the output folder."""
    folder = arguments.output
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not arguments.overwrite)):
        raise ValueError(
            f"--output is {folder}, which is not an empty folder; give a new folder, or add --overwrite to "
            "write into a folder of plans."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for ranks in sorted(set(arguments.ranks)):
        for plan in (plan for collective in COLLECTIVES for plan in usual(collective, ranks)):
            path = folder / f"{plan.name.replace(' ', '_')}_{ranks}.json"
            with writing(path) as file:
                write(plan, file)
            most = "any" if plan.max_bytes is None else plan.max_bytes
            print(f"wrote {path}: {plan.min_bytes} to {most} bytes")


def run_check(arguments: argparse.Namespace) -> None:
    """Check a collective plan, and print the plan's properties and predicted time."""
    if arguments.output:
        refuse_output(arguments.output, overwrite=arguments.overwrite)
        if arguments.output.suffix not in (".json", ".xml"):
            raise ValueError(f"--output is {arguments.output}; give a name that ends with .json or .xml.")
    network = network_of(arguments.network) if arguments.network else None
    plan = find(arguments.plan)
    try:
        report = check(plan)
    except ValueError as error:
        raise ValueError(f"{arguments.plan}: {error}") from error
    names: Mapping[int, str] = {rank: f"rank {rank}" for rank in range(plan.ranks)}
    unit = f"{arguments.gb_s:g} GB/s a link"
    if network:
        report = _routed(report, plan, network)
        names, unit = dict(enumerate(network.vertices)), network.name
        if network.unit != "GB/s":
            unit += f", 1 GB/s for 1 of its {network.unit}"

    def seconds_per_byte(link: tuple[int, int]) -> float:
        return 1e-9 / (network.matrix[link[0]][link[1]] if network else arguments.gb_s)

    print(printable("\n".join(_lines(plan, report, names, arguments.bytes))))
    seconds = report.predicted(arguments.bytes, arguments.alpha_us * 1e-6, seconds_per_byte)
    conditions = f"{arguments.bytes} bytes, {arguments.alpha_us:g} us a hop, {unit}"
    print(f"predicted: {seconds * 1e6:.1f} us ({conditions})")
    if arguments.output:
        with writing(arguments.output) as file:
            write(plan, file)
        print(f"wrote {arguments.output}")


def _lines(plan: Plan, report: Report, names: Mapping[int, str], size: int) -> list[str]:
    operations = Counter(step.op for _, _, _, step in plan.steps())
    listed = ", ".join(f"{count} {op}" for op, count in sorted(operations.items()))
    lines = [
        f"{plan.name}: {plan.collective} of {plan.ranks} ranks, {plan.chunks} chunks and "
        f"{plan.temporary} temporary ones; digest {plan.digest}",
        "correct in every interleaving, for any number of calls in a row",
        f"steps: {report.steps} ({listed})",
        f"channels: {len(plan.channels)}",
        f"depth: {report.depth} hops in a row; rounds: {len(report.loads)}",
    ]
    alike: dict[Fraction | int, list[str]] = defaultdict(list)
    for (source, target), part in sorted(report.bytes_of_link.items()):
        alike[part].append(f"{names[source]} -> {names[target]}")
    for part, links in sorted(alike.items(), reverse=True):
        more = f" and {len(links) - SHOWN} more" if len(links) > SHOWN else ""
        share = f"{part} of a rank's input, {round(part * size)} bytes"
        lines.append(f"{share}: {', '.join(links[:SHOWN])}{more}")
    return lines


def _routed(report: Report, plan: Plan, network: Network) -> Report:
    """Return a copy of a plan's report with loads of network links instead of loads of pairs of ranks."""
    if plan.network not in ("", network.digest) or network.ranks != plan.ranks:
        raise ValueError(f"--network {network.name} is not the network of the plan; give that network.")
    return replace(report, loads=tuple(routed(network, load) for load in report.loads))
