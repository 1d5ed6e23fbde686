"""Reads collective plans from JSON or MSCCL XML files, or makes them from names such as ring:all_gather:8.

`read_run` reads the plans of a run. If a plan was made for one network, its folder has the file of
this network, and the run must have the same number of ranks on each host as the network.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fairseq_tutel.files import content_of, json_of
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
    """Return a collective plan, given a file path or a name such as `two_hops:all_to_all:8:2`.

    Raises:
        ValueError: the text is neither.
    """
    if text.endswith((".json", ".xml")):
        return read(Path(text))
    given = re.fullmatch(r"(\w+):(\w+):([0-9]{1,4})(?::([0-9]{1,4}))?", text, re.ASCII)
    if not given or int(given[3]) > MOST:
        raise ValueError(
            f"{text} is not a collective plan; give a FILE.json, a FILE.xml or {NAMED}, with at most "
            f"{MOST} ranks and one of the names {', '.join(GENERATORS)}."
        )
    return make(given[1], given[2], int(given[3]), nodes=int(given[4] or 1))


def read(path: Path) -> Plan:
    """Read a collective plan from a JSON or XML file.

    Raises:
        ValueError: the file is unreadable or has no plan; the message names the file.
    """
    try:
        data = content_of(path) if path.suffix == ".xml" else json_of(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a collective plan ({error}).") from error
    try:
        return from_xml(data) if path.suffix == ".xml" else from_json(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(plan: Plan, path: Path) -> None:
    """Write a collective plan to a JSON file, or to an MSCCL XML file if the path ends in .xml."""
    text = to_xml(plan) if path.suffix == ".xml" else json.dumps(to_json(plan))
    path.write_text(text + "\n", encoding="utf-8")


class PlacedPlan(NamedTuple):
    """A collective plan that a run uses and that the checker has accepted.

    `name` is the file name without .json. `hosts` has the number of ranks on each host; None means any.
    """

    name: str
    plan: Plan
    report: Report
    hosts: tuple[int, ...] | None = None

    def fits(self, ranks: Sequence[int], local: int) -> bool:
        """Return whether a group of ranks can run the plan. A host has `local` ranks; 0 means unknown."""
        if len(ranks) != self.plan.ranks:
            return False
        return not local or self.hosts is None or self.hosts == hosts_of(ranks, local)


def hosts_of(ranks: Iterable[int], local: int) -> tuple[int, ...]:
    """Count the given ranks on each host, in the order of hosts; each host has `local` ranks."""
    return tuple(len(list(same)) for _, same in groupby(ranks, lambda rank: rank // local))


def read_run(path: str) -> tuple[PlacedPlan, ...]:
    """Read and check the plans of --moe-collective-plans, which is a file or a folder of *.json files.

    Raises:
        ValueError: there is no plan, or a plan is unreadable or wrong; the message names the file.
    """
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    networks = dict(_networks(sorted(folder.glob("*.json"))))
    hosts = {each.digest: tuple(map(len, each.hosts.values())) for each in networks.values()}
    files = sorted(set(folder.glob("*.json")) - set(networks)) if given.is_dir() else [given]
    try:
        placed = tuple(_placed(file, hosts) for file in files)
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from error
    if not placed:
        raise ValueError(
            f"{OPTION} is {path}, which has no plan; give the JSON file of a plan or a folder of them."
        )
    return placed


def _networks(paths: Iterable[Path]) -> Iterator[tuple[Path, Network]]:
    for path in paths:
        with contextlib.suppress(ValueError):  # the file has no network
            yield path, network.read(path)


def _placed(file: Path, hosts: Mapping[str, tuple[int, ...]]) -> PlacedPlan:
    """Read and check a plan; return it with the number of ranks on each host of its network.

    `hosts` has these numbers by the digest of the network.
    """
    plan = read(file)
    if plan.network and plan.network not in hosts:
        raise ValueError(
            f"{file}: the plan is for the network with the digest {plan.network}, but no network file in "
            "its folder has this digest; add the file of this network to the folder."
        )
    try:
        return PlacedPlan(file.stem, plan, check(plan), hosts.get(plan.network))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def refuse_unused(plans: Sequence[PlacedPlan], groups: Sequence[Sequence[int]], local: int) -> None:
    """Raise ValueError if a collective plan fits none of the groups of ranks in the run.

    `groups` has the ranks of each group with at least 2 ranks. A host has `local` ranks; 0 means unknown.
    """
    for placed in plans:
        if not any(placed.fits(ranks, local) for ranks in groups):
            sizes = " and ".join(map(str, sorted({len(ranks) for ranks in groups}))) or "1"
            on_hosts = f" ({'+'.join(map(str, placed.hosts))} on its hosts)" if placed.hosts else ""
            own_hosts = f" with {local} on a host" if placed.hosts else ""
            raise ValueError(
                f"{OPTION}: plan {placed.name} is for {placed.plan.ranks} ranks{on_hosts}, but the groups "
                f"of this run have {sizes} ranks{own_hosts}; make the plan for a group of this run, or "
                "remove it."
            )
