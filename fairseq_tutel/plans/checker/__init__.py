"""Proves that a plan ends, does not race and gives the result that it is asked for, or says why not.

In this order: shape (`shape`), deadlock (`order`), races (`races`), data (`data`),
lengths (`lengths`). A plan that passes gives its result in every interleaving of its lanes and
transfers, for any sizes, and for any number of calls in a row; of an all_reduce, the same bits on every
rank. What remains is how long it takes: the `Report`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from fairseq_tutel.planning.traffic import Load
from fairseq_tutel.plans.checker.data import check_data
from fairseq_tutel.plans.checker.lengths import kinds_of
from fairseq_tutel.plans.checker.order import Order, order_of
from fairseq_tutel.plans.checker.races import check_races
from fairseq_tutel.plans.checker.shape import check_shape
from fairseq_tutel.plans.format import Plan, PlanError

__all__ = ["PlanError", "Report", "check"]

Link = tuple[int, int]


@dataclass(frozen=True)
class Report:
    """What a plan that is right does.

    Attributes:
        steps: of all ranks.
        depth: signals on the longest chain of steps: trips from rank to rank, one after another.
        rounds: of every step by rank, lane and index: of a put the round in which it travels in the
            two-sided form, from 0 on, of others how many rounds are over before. Where ranks take a round's
            steps in an order that waits, signals, posts and pends allow, then make its transfers at once,
            every access has the order that the plan demands; a signal needs no message of its own.
        loads: of every round, by (source, target), the bytes on that link as a fraction of a rank's `in`;
            twice those of the data on channels of kind ll.
    """

    steps: int
    depth: int
    rounds: tuple[tuple[tuple[int, ...], ...], ...]
    loads: tuple[Load, ...]

    @property
    def bytes_of_link(self) -> Load:
        """By (source, target), the bytes on that link as a fraction of a rank's `in`."""
        total: dict[Link, Fraction] = {}
        for load in self.loads:
            for link, part in load.items():
                total[link] = total.get(link, Fraction(0)) + part
        return total

    def predicted(
        self, size: int, alpha: float, seconds_per_byte: float | Mapping[Link, float]
    ) -> float:
        """Return the seconds that the plan takes: its depth in alphas, and every round's slowest link.

        Args:
            size: bytes of a rank's `in`; of a broadcast of the root's.
            alpha: seconds a trip.
            seconds_per_byte: of every link, or by (source, target).
        """

        def slowness(link: Link) -> float:
            if isinstance(seconds_per_byte, Mapping):
                return seconds_per_byte[link]
            return seconds_per_byte

        slowest = (
            max(float(part) * size * slowness(link) for link, part in load.items())
            for load in self.loads
            if load
        )
        return self.depth * alpha + sum(slowest)


def check(plan: Plan, is_proved: bool = False) -> Report:
    """Return what a plan does.

    Args:
        plan: to check.
        is_proved: another rank has checked the same plan; only the report is made.

    Raises:
        PlanError: it may hang, race or give another result, or makes no sense; a sentence names rank, lane
            and step.
    """
    check_shape(plan)
    order = order_of(plan)
    if not is_proved:
        check_races(plan, order)
        check_data(plan, order)
        kinds_of(plan, order)
    return _report(plan, order)


def _report(plan: Plan, order: Order) -> Report:
    loads: list[dict[Link, Fraction]] = []
    rounds = [[[0] * len(lane) for lane in lanes] for lanes in plan.programs]
    for (rank, lane, index), step, level in zip(
        order.sites, order.steps, order.rounds, strict=True
    ):
        rounds[rank][lane][index] = level
        if step.op == "put" and step.channel is not None and step.n is not None:
            loads += [{} for _ in range(level + 1 - len(loads))]
            channel = plan.channels[step.channel]
            part = Fraction(step.n * (1 + (channel.kind == "ll")), plan.in_chunks)
            link = channel.source, channel.target
            loads[level][link] = loads[level].get(link, Fraction(0)) + part
    return Report(
        steps=len(order.steps),
        depth=order.depth,
        rounds=tuple(tuple(tuple(lane) for lane in lanes) for lanes in rounds),
        loads=tuple(loads),
    )
