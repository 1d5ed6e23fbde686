"""How a layer's rows travel and its experts are shared out: what may change from update to update."""

from dataclasses import dataclass

ALGORITHMS = ("linear", "2dh")


@dataclass(frozen=True, kw_only=True)
class How:
    """One way to run the same layer; results are equal but for rounding.

    Attributes:
        adaptive_r: 0: every rank gathers all experts' weights, and no row travels; else every row goes to
            this many ranks of its expert, each with that part of its hidden dimension.
        overlap: chunks of rows whose exchange overlaps with the experts.
        algorithm: of the all-to-all, linear or 2dh.
    """

    adaptive_r: int = 1
    overlap: int = 1
    algorithm: str = "linear"
