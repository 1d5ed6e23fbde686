"""Plans by file or name (FILE.json, MSCCL's FILE.xml, ring:all_gather:8), and those of a training run.

A plan may be made for a network, whose file is in the same folder. A run is compared with it by the number
of ranks on each host.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fairseq_tutel.files.untrusted import content_of, json_of
from fairseq_tutel.plans import network
from fairseq_tutel.plans.checker import Report, check
from fairseq_tutel.plans.format import Plan, from_json, to_json
from fairseq_tutel.plans.generators import GENERATORS, make
from fairseq_tutel.plans.msccl.reader import from_xml
from fairseq_tutel.plans.msccl.writer import to_xml
from fairseq_tutel.plans.network import Network

NAMED = "NAME:COLLECTIVE:RANKS[:NODES]"
MOST = 512  # ranks
OPTION = "--moe-collective-plans"


def find(text: str) -> Plan:
    """Return the plan of a file or a name such as `two_hops:all_to_all:8:2`.

    Raises:
        ValueError: it is neither.
    """
    if text.endswith((".json", ".xml")):
        return read(Path(text))
    given = re.fullmatch(r"(\w+):(\w+):([0-9]{1,4})(?::([0-9]{1,4}))?", text, re.ASCII)
    if not given or int(given[3]) > MOST:
        raise ValueError(
            f"{text} is not a plan; give a FILE.json, a FILE.xml or {NAMED}, of at most {MOST} ranks and "
            f"with NAME one of {', '.join(GENERATORS)}."
        )
    return make(given[1], given[2], int(given[3]), nodes=int(given[4] or 1))


def read(path: Path) -> Plan:
    """Read a plan's file.

    Raises:
        ValueError: it has no plan; names the file.
    """
    try:
        data = content_of(path) if path.suffix == ".xml" else json_of(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can not be read as a plan ({error}).") from error
    try:
        return from_xml(data) if path.suffix == ".xml" else from_json(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(plan: Plan, path: Path) -> None:
    """Write a plan as JSON, or as XML if the path ends in .xml."""
    text = to_xml(plan) if path.suffix == ".xml" else json.dumps(to_json(plan))
    path.write_text(text + "\n", encoding="utf-8")


class PlacedPlan(NamedTuple):
    """A checked plan, the name of its file without .json, and the ranks on each host (None: any)."""

    name: str
    plan: Plan
    report: Report
    hosts: tuple[int, ...] | None = None

    def fits(self, ranks: Sequence[int], local: int) -> bool:
        """Return whether a group of ranks can run it, with `local` ranks on a host; 0: unknown."""
        if len(ranks) != self.plan.ranks:
            return False
        return not local or self.hosts is None or self.hosts == hosts_of(ranks, local)


def hosts_of(ranks: Iterable[int], local: int) -> tuple[int, ...]:
    """Return how many of some ranks are on each host of `local` ranks, in order."""
    return tuple(len(list(same)) for _, same in groupby(ranks, lambda rank: rank // local))


def read_run(path: str) -> tuple[PlacedPlan, ...]:
    """Read and check all plans of a file, or of a folder's *.json files in the order of their names.

    Raises:
        ValueError: there is no plan, or one cannot be read or is wrong; names the file.
    """
    place = Path(path)
    found = sorted(place.glob("*.json")) if place.is_dir() else [place]
    networks = dict(_networks(found)) if place.is_dir() else {}
    try:
        plans = {file: read(file) for file in found if file not in networks}
        if not place.is_dir() and plans[place].network:
            networks = dict(_networks(place.parent.glob("*.json")))
        hosts = {each.digest: tuple(map(len, each.hosts.values())) for each in networks.values()}
        placed = tuple(_placed(file, plan, hosts) for file, plan in plans.items())
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from error
    if not placed:
        raise ValueError(
            f"{OPTION} is {path}, which has no plan; give a plan's FILE.json or a folder of plans."
        )
    return placed


def _networks(paths: Iterable[Path]) -> Iterator[tuple[Path, Network]]:
    for path in paths:
        with contextlib.suppress(ValueError):  # the file has no network
            yield path, network.read(path)


def _placed(file: Path, plan: Plan, hosts: Mapping[str, tuple[int, ...]]) -> PlacedPlan:
    """Check a plan; `hosts` has the ranks on each host by the digest of a network."""
    if plan.network and plan.network not in hosts:
        raise ValueError(
            f"{file}: the plan is for the network {plan.network}, but no network file in its folder has "
            "this digest; put that network's file there."
        )
    try:
        return PlacedPlan(file.stem, plan, check(plan), hosts.get(plan.network))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def refuse_unused(plans: Sequence[PlacedPlan], groups: Sequence[Sequence[int]], local: int) -> None:
    """Refuse plans that no group of a run can use by a ValueError with the plan and the fix.

    `groups` are the ranks of each group of more than one rank, `local` the ranks of a host (0: unknown).
    """
    for placed in plans:
        plan = placed.plan
        if any(placed.fits(ranks, local) for ranks in groups):
            continue
        sizes = " and ".join(map(str, sorted({len(ranks) for ranks in groups}))) or "1"
        if all(len(ranks) != plan.ranks for ranks in groups):
            raise ValueError(
                f"{OPTION}: {placed.name} is for {plan.ranks} ranks, and this run's groups have {sizes}; "
                "make it for one of these, or leave it out."
            )
        hosts = "+".join(map(str, placed.hosts or ()))
        here = "+".join(map(str, hosts_of(range(plan.ranks), local)))
        raise ValueError(
            f"{OPTION}: {placed.name} is for a network with {hosts} ranks on its hosts, and this run has "
            f"{here}; make it for this network, start ranks as there, or leave it out."
        )
