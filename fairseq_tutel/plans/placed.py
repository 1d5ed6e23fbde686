"""The plans of a training: read from a file or a folder, proved, and refused where no group can run them.

A folder also holds the file of the network for which its plans were made (`planning.network`), where they
name one: what is known of a run is which ranks share a host, and that is compared.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from fairseq_tutel.planning import network
from fairseq_tutel.planning.network import Network
from fairseq_tutel.plans import files
from fairseq_tutel.plans.checker import Report, check
from fairseq_tutel.plans.format import Plan

OPTION = "--moe-collective-plans"
# What a training calls.
USED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True)
class PlacedPlan:
    """A plan and where it may run.

    Attributes:
        name: of its file, without .json.
        plan: itself, proved.
        report: what the checker says of it.
        hosts: how many of its ranks each host has, in order; None: any.
    """

    name: str
    plan: Plan
    report: Report
    hosts: tuple[int, ...] | None = None

    def fits(self, ranks: Sequence[int], local: int) -> bool:
        """Whether a group of these ranks can run it, where a host has `local`; 0: nobody knows."""
        if len(ranks) != self.plan.ranks:
            return False
        return not local or self.hosts is None or self.hosts == hosts_of(ranks, local)


def hosts_of(ranks: Iterable[int], local: int) -> tuple[int, ...]:
    """Return how many of some ranks each host has, in order, where a host has `local`."""
    return tuple(len(list(same)) for _, same in groupby(ranks, lambda rank: rank // local))


@lru_cache(1)
def read(path: str, proved: frozenset[str] = frozenset()) -> tuple[PlacedPlan, ...]:
    """Read all plans of a file, or of a folder's files *.json in the order of their names.

    Args:
        path: of the file or folder.
        proved: digests of plans that another rank has checked; others are checked here.

    Raises:
        ValueError: there is none, or one cannot be read, or is not right; the sentence names its file.
    """
    place = Path(path)
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    networks = dict(_networks(files)) if place.is_dir() else {}
    plans = {file: _read(file) for file in files if file not in networks}
    if not plans:
        raise ValueError(
            f"{OPTION} is {path}, where no plan lies; give a plan's FILE.json or their folder."
        )
    if not place.is_dir() and plans[place].network:
        networks = dict(_networks(place.parent.glob("*.json")))
    hosts = {found.digest: tuple(map(len, found.hosts.values())) for found in networks.values()}
    return tuple(_placed(file, plan, hosts, proved) for file, plan in plans.items())


def _networks(files: Iterable[Path]) -> Iterator[tuple[Path, Network]]:
    for file in files:
        with contextlib.suppress(ValueError):  # of what is no network
            yield file, network.read(file)


def _read(file: Path) -> Plan:
    try:
        return files.read(file)
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from error


def _placed(
    file: Path, plan: Plan, hosts: Mapping[str, tuple[int, ...]], proved: frozenset[str]
) -> PlacedPlan:
    """Return a plan, proved; `hosts` are those of networks, by digest."""
    if plan.network and plan.network not in hosts:
        raise ValueError(
            f"{OPTION}: {file}: it is made for the network {plan.network}, whose file is not beside it; "
            "put that there, which says what ranks share a host."
        )
    try:
        return PlacedPlan(
            file.stem, plan, check(plan, plan.digest in proved), hosts.get(plan.network)
        )
    except ValueError as error:
        raise ValueError(f"{OPTION}: {file}: {error}") from error


def refuse_unused(plans: Sequence[PlacedPlan], groups: Sequence[Sequence[int]], local: int) -> None:
    """Refuse a plan that no group of a run can use.

    Args:
        plans: of `read`.
        groups: the ranks of each group of more than one.
        local: ranks of a host; 0 where nobody knows.

    Raises:
        ValueError: naming the plan and the fix.
    """
    for placed in plans:
        plan = placed.plan
        if plan.collective not in USED:
            raise ValueError(
                f"{OPTION}: {placed.name} is a plan of {plan.collective}, which no training calls; leave "
                "it out."
            )
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
