"""Check that all ranks have the same options and environment before ranks exchange tensors."""

import json
from collections.abc import Mapping
from typing import Any

from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.guard import name_ranks

SHOWN_FACTS = 3
SHOWN_CHARACTERS = 80


def agree(facts: Mapping[str, Any]) -> None:
    """Check that all ranks have equal facts, such as the values of command-line options. Collective.

    `facts` maps names, such as the name of an option, to values. Error messages use these names.

    Raises:
        ValueError: the facts of ranks differ. All ranks raise the same message.
    """
    own = {name: _text(value) for name, value in facts.items()}
    gathered = world.all_gather_object(own, "the comparison of all ranks' options")
    differing = []
    for name in sorted(set().union(*gathered)):
        ranks_of: dict[str, list[int]] = {}
        for rank, texts in enumerate(gathered):
            ranks_of.setdefault(texts.get(name, "missing"), []).append(rank)
        if len(ranks_of) > 1:
            values = [f"{text[:SHOWN_CHARACTERS]} on {name_ranks(on)}" for text, on in ranks_of.items()]
            differing.append(f"{name} is {' and '.join(values)}")
    if differing:
        raise ValueError(
            f"{', '.join(differing[:SHOWN_FACTS])}; start all ranks with the same command, "
            "packages and data."
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True, default=str)
