"""Reads collective plans from JSON or MSCCL XML files, or makes them from names."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_tutel.files import content_of, json_of
from fairseq_tutel.plans.checker import Report, check
from fairseq_tutel.plans.format import Plan, PlanError, from_json, to_json
from fairseq_tutel.plans.generators import GENERATORS, make
from fairseq_tutel.plans.msccl.reader import from_xml
from fairseq_tutel.plans.msccl.writer import to_xml

NAMED = "NAME:COLLECTIVE:RANKS[:NODES]"
MOST = 512  # The largest number of ranks of a plan.
OPTION = "--moe-collective-plans"


def find(text: str) -> Plan:
    """Read a collective plan from a file, or make the plan with a name such as `two_hops:all_to_all:8:2`.

    Raises:
        ValueError: the text is neither a path nor the name of a plan.
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
        ValueError: the file is unreadable or has no plan. The error message names the file.
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
    """A collective plan that the checker accepted. `name` is the plan's file name without the suffix."""

    name: str
    plan: Plan
    report: Report

    def fits(self, ranks: Sequence[int]) -> bool:
        """Return whether the group of these ranks can run the collective plan."""
        return len(ranks) == self.plan.ranks


def read_run(path: str) -> tuple[PlacedPlan, ...]:
    """Read and check the plans of `--moe-collective-plans`, a path of a file or a folder of JSON files.

    Raises:
        ValueError: there is no plan, or a plan is unreadable or wrong. The error message names the file.
    """
    place = Path(path)
    placed = []
    for file in sorted(place.glob("*.json")) if place.is_dir() else [place]:
        try:
            plan = read(file)
            placed.append(PlacedPlan(file.stem, plan, check(plan)))
        except ValueError as error:
            where = f"{file}: " if isinstance(error, PlanError) else ""  # Errors of `read` name the file.
            raise ValueError(f"{OPTION}: {where}{error}") from error
    if not placed:
        raise ValueError(
            f"{OPTION} is {path}, which has no plan; give the JSON file of a plan or a folder of them."
        )
    return tuple(placed)


def refuse_unused(plans: Sequence[PlacedPlan], groups: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if a collective plan fits none of the run's groups of ranks.

    `groups` has the ranks of each group with at least 2 ranks.
    """
    for placed in plans:
        if not any(placed.fits(ranks) for ranks in groups):
            sizes = " and ".join(map(str, sorted({len(ranks) for ranks in groups}))) or "1"
            raise ValueError(
                f"{OPTION}: plan {placed.name} is for {placed.plan.ranks} ranks, but the groups of this "
                f"run have {sizes} ranks; make the plan for a group of this run, or remove it."
            )
