"""A strategy has the execution options of a MoE layer that may change between updates."""

import re
from dataclasses import dataclass

ALGORITHMS = ("linear", "2dh")
PLAN = "plan:"  # An algorithm with this prefix names a collective plan.


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The options with which a MoE layer runs. All strategies give the same results up to rounding.

    Attributes:
        adaptive_r: With 0, every rank gathers the weights of all experts, and no row is sent. Above 0, a
            row is sent to this many ranks of its expert, and each rank computes with 1 / `adaptive_r` of
            the hidden dimension.
        overlap: the number of row chunks (at least 1), whose all-to-alls overlap with the experts.
        algorithm: the all-to-all algorithm: `linear`, `2dh` or `plan:NAME`.

    Raises:
        ValueError: a value is invalid.

    Example:
        >>> layer = ft.MoELayer(ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8))
        >>> layer.follow(ft.Strategy(overlap=2))  # All ranks must follow the same strategy.
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
        """The name of the collective plan for the all-to-all, or empty for other algorithms."""
        return self.algorithm.removeprefix(PLAN) if self.algorithm.startswith(PLAN) else ""


def is_algorithm(text: str) -> bool:
    """Return whether a text is an all-to-all algorithm: `linear`, `2dh` or `plan:NAME`."""
    return text in ALGORITHMS or (text.startswith(PLAN) and text != PLAN)


def degree_of(parallel_type: str, slices: int) -> int | None:
    """Return `adaptive_r` for a value of --moe-parallel-type, or None if the value is unknown.

    The values are `adaptive:r`, `data` (r = 1), `model` (r = `slices`) and `auto` (r = 1).
    """
    found = re.fullmatch(r"adaptive:(-?\d{1,6})", parallel_type)
    known = {"data": 1, "model": slices, "auto": 1}
    return known.get(parallel_type) if found is None else int(found[1])
