"""How a layer's rows travel and its experts are shared out: what may change from update to update."""

import re
from dataclasses import dataclass

ALGORITHMS = ("linear", "2dh")
PLAN = "plan:"  # before the name of a plan


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to run the same layer; results are equal but for rounding.

    Attributes:
        adaptive_r: 0: every rank gathers all experts' weights, and no row travels; else every row goes to
            this many ranks of its expert, each with that part of its hidden dimension.
        overlap: chunks of rows whose exchange overlaps with the experts.
        algorithm: of the all-to-all: linear, 2dh, or plan: and the name of one.

    Raises:
        ValueError: none of these.
    """

    adaptive_r: int = 1
    overlap: int = 1
    algorithm: str = "linear"

    def __post_init__(self) -> None:
        for name, least in (("adaptive_r", 0), ("overlap", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; give a whole number, at least {least}.")
        if not is_algorithm(self.algorithm):
            raise ValueError(f"algorithm is {self.algorithm!r}; give linear, 2dh or plan:NAME.")

    @property
    def plan(self) -> str:
        """The name of the plan by which rows travel, empty for none."""
        return self.algorithm.removeprefix(PLAN) if self.algorithm.startswith(PLAN) else ""


def is_algorithm(text: str) -> bool:
    """Whether this names an all-to-all."""
    return text in ALGORITHMS or (text.startswith(PLAN) and text != PLAN)


def degree_of(parallel_type: str, slices: int) -> int | None:
    """Return the r that a word names: adaptive:r, data (1), model (s) or auto (1); None for no such word.

    Args:
        parallel_type: of an option or of Tutel's argument.
        slices: s, the ranks that share an expert.
    """
    found = re.fullmatch(r"adaptive:(-?\d{1,6})", parallel_type)
    known = {"data": 1, "model": slices, "auto": 1}
    return known.get(parallel_type) if found is None else int(found[1])
