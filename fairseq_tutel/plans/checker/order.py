"""Check of order: which step waits for which, one possible order of all steps, and rounds.

Steps are numbered rank by rank, lane by lane. A lane takes its steps in order, and the k-th wait or pend
follows the k-th signal or post. Nothing depends on timing, so one run shows whether all runs end. A put's
transfer ends with the wait for the next signal; its source has been read after that wait or the next flush.

Rounds are for two-sided messages. All ranks go through the rounds together. In each a rank first takes its
own steps, then sends and receives at once. A put's round is the length of the longest chain of transfers
that end before it.
"""

from collections import defaultdict
from dataclasses import dataclass

from fairseq_tutel.plans.checker.shape import PAIRS, site
from fairseq_tutel.plans.format import Plan, PlanError, Step


@dataclass(frozen=True)
class Order:
    """The order of one call's steps.

    Attributes:
        steps: all steps, by number.
        lanes: the lane of each step, numbered over all ranks.
        sites: (rank, lane, index) of each step.
        rank_lanes: the lanes of each rank, at least one.
        cause: for a wait its signal, for a pend its post.
        arrival: for a put, the wait that ends it.
        release: for a put, the next flush, if any.
        run: all steps, in a possible order.
        rounds: for a put its round; for other steps, the number of rounds that end before.
        depth: signals on the longest chain of steps.
    """

    steps: list[Step]
    lanes: list[int]
    sites: list[tuple[int, int, int]]
    rank_lanes: list[list[int]]
    cause: dict[int, int]
    arrival: dict[int, int]
    release: dict[int, int]
    run: list[int]
    rounds: list[int]
    depth: int

    def name(self, number: int) -> str:
        """Return the name of a step for a sentence."""
        return f"{site(*self.sites[number])} ({self.steps[number].op})"


def order_of(plan: Plan) -> Order:
    """Return the order of a plan that has passed `check_shape`; a `PlanError` names a deadlock's cycle."""
    steps: list[Step] = []
    sites, lanes = [], []
    rank_lanes: list[list[int]] = []
    by_lane: list[range] = []
    for rank, program in enumerate(plan.programs):
        own_lanes = program or ((),)
        rank_lanes.append(list(range(len(by_lane), len(by_lane) + len(own_lanes))))
        for lane, content in enumerate(own_lanes):
            lanes += [len(by_lane)] * len(content)
            by_lane.append(range(len(steps), len(steps) + len(content)))
            steps += content
            sites += [(rank, lane, index) for index in range(len(content))]
    cause, arrival, release = _matches(steps, sites)
    run = _run(plan, by_lane, lanes, cause, sites, steps)
    rounds, depth = _levels(steps, lanes, cause, arrival, release, run, len(by_lane))
    return Order(steps, lanes, sites, rank_lanes, cause, arrival, release, run, rounds, depth)


def _matches(
    steps: list[Step], sites: list[tuple[int, int, int]]
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return causes, arrivals and releases; see `Order`."""
    by_kind: dict[tuple[str, int, int | None], list[int]] = defaultdict(list)
    signal_of: dict[int, int] = {}
    release: dict[int, int] = {}
    issued: dict[int | None, list[int]] = defaultdict(list)  # puts before the next signal
    unread: dict[int | None, list[int]] = defaultdict(list)  # puts before the next flush
    for number, step in enumerate(steps):
        if step.op == "put":
            issued[step.channel].append(number)
            unread[step.channel].append(number)
        elif step.op == "signal":
            signal_of.update(dict.fromkeys(issued.pop(step.channel, ()), number))
        elif step.op == "flush":
            release.update(dict.fromkeys(unread.pop(step.channel, ()), number))
        if step.channel is not None:
            by_kind[step.op, -1, step.channel].append(number)
        elif step.semaphore is not None:
            by_kind[step.op, sites[number][0], step.semaphore].append(number)
    cause: dict[int, int] = {}
    for first, second, _ in PAIRS:
        for (op, of, index), takers in by_kind.items():
            if op == second:
                cause.update(zip(takers, by_kind[first, of, index], strict=True))
    taker = {giver: number for number, giver in cause.items()}
    return cause, {put: taker[signal] for put, signal in signal_of.items()}, release


def _run(
    plan: Plan,
    by_lane: list[range],
    lanes: list[int],
    cause: dict[int, int],
    sites: list[tuple[int, int, int]],
    steps: list[Step],
) -> list[int]:
    """Return a possible order of all steps."""
    taken = [False] * len(lanes)
    next_of = [content.start for content in by_lane]
    waiting: dict[int, int] = {}  # by cause, the waiting lane
    run: list[int] = []
    ready = list(range(len(by_lane) - 1, -1, -1))
    while ready:
        lane = ready.pop()
        while next_of[lane] < by_lane[lane].stop:
            number = next_of[lane]
            needed = cause.get(number)
            if needed is not None and not taken[needed]:
                waiting[needed] = lane
                break
            taken[number] = True
            next_of[lane] += 1
            run.append(number)
            if number in waiting:
                ready.append(waiting.pop(number))
    if len(run) == len(lanes):
        return run

    def name(number: int) -> str:
        return f"{site(*sites[number])} ({steps[number].op})"

    lane = next(iter(waiting.values()))
    path: list[int] = []
    while next_of[lane] not in path:
        path.append(next_of[lane])
        lane = lanes[cause[next_of[lane]]]
    cycle = path[path.index(next_of[lane]) :]
    ways = [
        f"{name(number)} waits for {name(cause[number])}, which comes after "
        f"{'itself' if len(cycle) == 1 else name(after)}"
        for number, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    raise PlanError(f"Plan {plan.name!r} has a deadlock: {'; '.join(ways)}.")


def _levels(
    steps: list[Step],
    lanes: list[int],
    cause: dict[int, int],
    arrival: dict[int, int],
    release: dict[int, int],
    run: list[int],
    count: int,
) -> tuple[list[int], int]:
    """Return the round of each step, and the most signals on a chain of steps."""
    ended: dict[int, list[int]] = defaultdict(list)  # by wait or flush, the puts that end with it
    for ends in (arrival, release):
        for put, number in ends.items():
            ended[number].append(put)
    rounds, depths = [0] * len(lanes), [0] * len(lanes)
    lane_round, lane_depth = [0] * count, [0] * count
    for number in run:
        lane = lanes[number]
        level, depth = lane_round[lane], lane_depth[lane]
        if number in cause:
            level = max(level, rounds[cause[number]])
            depth = max(depth, depths[cause[number]] + (steps[number].op == "wait"))
        level = max([level, *(rounds[put] + 1 for put in ended[number])])
        rounds[number] = lane_round[lane] = level
        depths[number] = lane_depth[lane] = depth
    return rounds, max(depths, default=0)
