"""The checker proves that a collective plan ends, has no races and computes its collective.

The checks run in the order `shape`, `order` (deadlocks), `races`, `data`. A collective plan that passes all
checks is correct for every timing of steps and transfers, for all sizes and for any number of calls in a
row. A correct all_reduce plan gives the same bits on all ranks. The `Report` predicts a plan's time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from fairseq_tutel.plans.checker.data import check_data
from fairseq_tutel.plans.checker.order import Order
from fairseq_tutel.plans.checker.shape import check_shape
from fairseq_tutel.plans.format import Load, Plan, PlanError

__all__ = ["PlanError", "Report", "check"]


@dataclass(frozen=True)
class Report:
    """The cost of a collective plan.

    Attributes:
        depth: the largest number of signals on a chain of dependent steps.
        loads: for each round (see order.py), bytes by (source, target), divided by a rank's input bytes.
    """

    steps: int
    depth: int
    loads: tuple[Load, ...]

    @property
    def bytes_of_link(self) -> Load:
        """The bytes that each link (source, target) carries in total, divided by a rank's input bytes."""
        links = {link for load in self.loads for link in load}
        return {link: sum(load.get(link, 0) for load in self.loads) for link in links}

    def predicted(
        self, size: int, alpha: float, seconds_per_byte: Callable[[tuple[int, int]], float]
    ) -> float:
        """Return the plan's predicted seconds if the input of each rank has `size` bytes.

        The prediction is `alpha` times the depth, plus the time of the slowest link in each round.
        """
        slowest = (
            max(float(part) * size * seconds_per_byte(link) for link, part in load.items())
            for load in self.loads
            if load
        )
        return self.depth * alpha + sum(slowest)


def check(plan: Plan) -> Report:
    """Check that a collective plan is correct, and return its cost.

    Raises:
        PlanError: the plan is malformed, may hang or race, or gives a wrong result.
    """
    # Only this check needs numpy, which tools must not import when they print their help.
    from fairseq_tutel.plans.checker.races import check_races

    check_shape(plan)
    order = Order(plan)
    check_races(plan, order)
    check_data(plan, order)
    return Report(len(order.steps), order.depth, tuple(_loads(plan, order)))


def _loads(plan: Plan, order: Order) -> list[dict[tuple[int, int], Fraction]]:
    loads: list[dict[tuple[int, int], Fraction]] = []
    for step, level in zip(order.steps, order.rounds, strict=True):
        if step.op == "put" and step.channel is not None:
            loads += [{} for _ in range(level + 1 - len(loads))]
            channel = plan.channels[step.channel]
            part = Fraction(step.n, plan.in_chunks)
            link = channel.source, channel.target
            loads[level][link] = loads[level].get(link, Fraction(0)) + part
    return loads
