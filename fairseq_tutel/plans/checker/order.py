"""Finds the dependencies, a possible execution order and the rounds of a collective plan's steps.

Steps are numbered by rank, lane and index in the lane. A lane runs its steps one after another. The k-th
wait on a channel depends on the channel's k-th signal. The k-th pend on a semaphore depends on the
semaphore's k-th post. Steps have no other dependencies, so if one execution ends, all executions end. A
put's transfer ends with the wait for the next signal. After that wait, or after the next flush, the put has
finished reading its source.

Rounds are needed to run a plan with two-sided messages (send and receive). All ranks go through the rounds
together. In each round, a rank first runs its copies and sums, and then sends and receives at the same
time. The round of a put is the length of the longest chain of transfers that must end before this put.
"""

from collections import defaultdict

from fairseq_tutel.plans.checker.shape import PAIRS, site
from fairseq_tutel.plans.format import Plan, PlanError, Step


class Order:
    """The order of the steps in one call of a collective plan that has passed `check_shape`.

    Raises:
        PlanError: the plan has a deadlock. The error message names the steps that wait for each other.
    """

    def __init__(self, plan: Plan) -> None:
        self.steps: list[Step] = []
        self.sites: list[tuple[int, int, int]] = []  # The (rank, lane, index) of each step.
        self.lanes: list[int] = []  # The lane of each step, numbered over all ranks.
        self.rank_lanes: list[list[int]] = []  # The lanes of each rank, at least one per rank.
        self._by_lane: list[range] = []
        for rank, program in enumerate(plan.programs):
            self.rank_lanes.append([])
            for lane, steps in enumerate(program or ((),)):
                self.rank_lanes[-1].append(len(self._by_lane))
                self.lanes += [len(self._by_lane)] * len(steps)
                self._by_lane.append(range(len(self.steps), len(self.steps) + len(steps)))
                self.steps += steps
                self.sites += [(rank, lane, index) for index in range(len(steps))]
        self.cause: dict[int, int] = {}  # Maps each waiting step to the signal or post that it awaits.
        self.arrival: dict[int, int] = {}  # Maps a put to the wait that ends the put.
        self.release: dict[int, int] = {}  # Maps a put to the channel's next flush, if there is one.
        self._match()
        self.run = self._run(plan.name)
        # `rounds` has the round of each put. For other steps, `rounds` has the number of rounds that end
        # before the step. `depth` is the largest number of signals on a chain of dependent steps.
        self.rounds, self.depth = self._levels()

    def name(self, number: int) -> str:
        """Return a step's rank, lane, index and operation as text for an error message."""
        return f"{site(*self.sites[number])} ({self.steps[number].op})"

    def _match(self) -> None:
        by_kind: dict[tuple[str, int, int | None], list[int]] = defaultdict(list)
        signal_of: dict[int, int] = {}
        issued: dict[int | None, list[int]] = defaultdict(list)  # Puts since the channel's last signal.
        unread: dict[int | None, list[int]] = defaultdict(list)  # Puts since the channel's last flush.
        for number, step in enumerate(self.steps):
            if step.op == "put":
                issued[step.channel].append(number)
                unread[step.channel].append(number)
            elif step.op == "signal":
                signal_of.update(dict.fromkeys(issued.pop(step.channel, ()), number))
            elif step.op == "flush":
                self.release.update(dict.fromkeys(unread.pop(step.channel, ()), number))
            if step.channel is not None:
                by_kind[step.op, -1, step.channel].append(number)
            elif step.semaphore is not None:
                by_kind[step.op, self.sites[number][0], step.semaphore].append(number)
        for first, second, _ in PAIRS:
            for (op, of, index), takers in by_kind.items():
                if op == second:
                    self.cause.update(zip(takers, by_kind[first, of, index], strict=True))
        taker = {giver: number for number, giver in self.cause.items()}
        self.arrival = {put: taker[signal] for put, signal in signal_of.items()}

    def _run(self, name: str) -> list[int]:
        """Return one possible execution order of all steps. Raise PlanError at a deadlock."""
        taken = [False] * len(self.steps)
        next_of = [content.start for content in self._by_lane]
        waiting: dict[int, int] = {}  # Maps a missing signal or post to the lane that waits for it.
        run: list[int] = []
        ready = list(range(len(self._by_lane) - 1, -1, -1))
        while ready:
            lane = ready.pop()
            while next_of[lane] < self._by_lane[lane].stop:
                number = next_of[lane]
                needed = self.cause.get(number)
                if needed is not None and not taken[needed]:
                    waiting[needed] = lane
                    break
                taken[number] = True
                next_of[lane] += 1
                run.append(number)
                if number in waiting:
                    ready.append(waiting.pop(number))
        if len(run) == len(self.steps):
            return run
        number = next_of[next(iter(waiting.values()))]
        path: list[int] = []
        while number not in path:
            path.append(number)
            number = next_of[self.lanes[self.cause[number]]]
        cycle = path[path.index(number) :]
        ways = [
            f"{self.name(number)} waits for {self.name(self.cause[number])}, which runs after "
            f"{'this wait' if len(cycle) == 1 else self.name(after)}"
            for number, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        ]
        raise PlanError(f"Plan {name!r} has a deadlock: {'; '.join(ways)}.")

    def _levels(self) -> tuple[list[int], int]:
        """Return the round of each step, and the largest number of signals on a chain of steps."""
        ended: dict[int, list[int]] = defaultdict(list)  # Maps a wait or flush to the puts that it ends.
        for ends in (self.arrival, self.release):
            for put, number in ends.items():
                ended[number].append(put)
        rounds, depths = [0] * len(self.steps), [0] * len(self.steps)
        lane_round, lane_depth = [0] * len(self._by_lane), [0] * len(self._by_lane)
        for number in self.run:
            lane = self.lanes[number]
            level, depth = lane_round[lane], lane_depth[lane]
            if number in self.cause:
                level = max(level, rounds[self.cause[number]])
                depth = max(depth, depths[self.cause[number]] + (self.steps[number].op == "wait"))
            level = max([level, *(rounds[put] + 1 for put in ended[number])])
            rounds[number] = lane_round[lane] = level
            depths[number] = lane_depth[lane] = depth
        return rounds, max(depths, default=0)
