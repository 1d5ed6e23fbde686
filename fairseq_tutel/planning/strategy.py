"""Strategy: the execution options that may change between updates."""

import re
from dataclasses import dataclass

ALGORITHMS = ("linear", "2dh")
PLAN = "plan:"  # prefix of the name of a collective plan


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to execute a layer. Results of all strategies are equal up to rounding.

    With `adaptive_r` 0, every rank gathers all experts' weights, and no row is sent. Else every row is sent
    to this many ranks of its expert, each with that part of the hidden dimension.
    """

    adaptive_r: int = 1
    overlap: int = 1  # row chunks whose all-to-alls overlap with the experts
    algorithm: str = "linear"  # of the all-to-all: linear, 2dh or plan:NAME

    def __post_init__(self) -> None:
        for name, least in (("adaptive_r", 0), ("overlap", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; give a whole number, at least {least}.")
        if not is_algorithm(self.algorithm):
            raise ValueError(f"algorithm is {self.algorithm!r}; give linear, 2dh or plan:NAME.")

    @property
    def plan(self) -> str:
        """The name of the all-to-all's collective plan, empty for none."""
        return self.algorithm.removeprefix(PLAN) if self.algorithm.startswith(PLAN) else ""


def is_algorithm(text: str) -> bool:
    """Whether this is the name of an all-to-all algorithm."""
    return text in ALGORITHMS or (text.startswith(PLAN) and text != PLAN)


def degree_of(parallel_type: str, slices: int) -> int | None:
    """Return the r of a --moe-parallel-type: adaptive:r, data (1), model (s) or auto (1); else None."""
    found = re.fullmatch(r"adaptive:(-?\d{1,6})", parallel_type)
    known = {"data": 1, "model": slices, "auto": 1}
    return known.get(parallel_type) if found is None else int(found[1])
