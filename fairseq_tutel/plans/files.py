"""Plans by file or name: FILE.json, MSCCL's FILE.xml, or a well-known plan such as ring:all_gather:8."""

import json
import re
from pathlib import Path

from fairseq_tutel.files.small import content_of, json_of
from fairseq_tutel.plans.format import Plan, from_json, to_json
from fairseq_tutel.plans.generators import GENERATORS, make
from fairseq_tutel.plans.msccl.reader import from_xml
from fairseq_tutel.plans.msccl.writer import to_xml

NAMED = "NAME:COLLECTIVE:RANKS[:NODES]"
MOST = 512  # ranks


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
