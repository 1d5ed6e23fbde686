"""Runs a small collective plan in all interleavings of lanes and transfers, to test the plan checker.

A channel is a queue of issued puts and signals. An issued put reads, writes, and then leaves the channel.
Two accesses to a cell, of which one writes, race if either may be the next action.
"""

from collections.abc import Iterator
from typing import Any

from fairseq_tutel.plans.format import REDUCING, Plan, Step

# An action has a name, the set of cells that it reads, and the set of cells that it writes.
Action = tuple[tuple[Any, ...], frozenset, frozenset]


class WrongError(Exception):
    """This error reports an interleaving with a race, a deadlock or a wrong result."""


class Interleavings:
    """Explores all interleavings of a well-formed plan.

    A state is (calls that each rank began, steps that each lane took in its call, queues of the channels).
    """

    def __init__(self, plan: Plan, calls: int = 3) -> None:
        self.plan, self.calls = plan, calls
        # For each call and chunk: the first rank's all_reduce result, which all other ranks must also get.
        self.sums = {}
        self.lanes = [(r, lane) for r, lanes in enumerate(plan.programs) for lane in range(len(lanes))]

    def wrong(self) -> str | None:
        """Return the error of an incorrect interleaving, or None if all interleavings are correct."""
        plan = self.plan
        start = ((0,) * plan.ranks, (0,) * len(self.lanes), ((),) * len(plan.channels))
        begun, seen = [(start, {}, {})], {start}
        try:
            while begun:
                state, memory, posts = begun.pop()
                actions = list(self.actions(state, posts))
                self.refuse_races(actions)
                if not actions and (min(state[0]) < self.calls or not self.all_over(state)):
                    return "deadlock"
                if not actions:
                    for rank in range(plan.ranks):
                        self.judge(rank, self.calls - 1, memory)
                for name, _, _ in actions:
                    after = self.take(name, state, memory, posts)
                    if after[0] not in seen:
                        seen.add(after[0])
                        begun.append(after)
        except WrongError as wrong:
            return str(wrong)
        return None

    def steps(self, lane: int) -> tuple[Step, ...]:
        rank, index = self.lanes[lane]
        return self.plan.programs[rank][index]

    def is_over(self, state, rank: int) -> bool:
        """Return whether a rank is between two calls of the plan."""
        of_rank = [lane for lane, (r, _) in enumerate(self.lanes) if r == rank]
        return all(state[1][lane] == len(self.steps(lane)) for lane in of_rank) or not state[0][rank]

    def all_over(self, state) -> bool:
        return all(self.is_over(state, rank) for rank in range(self.plan.ranks))

    def cells(self, rank: int, call: int, place, n: int) -> list[tuple]:
        name = (place.buffer, call % 2) if place.buffer == "tmp" else (place.buffer,)
        return [(rank, name, place.chunk + i) for i in range(n)]

    def actions(self, state, posts) -> Iterator[Action]:
        """Yield all possible next actions of a state."""
        calls, taken, queues = state
        for rank, call in enumerate(calls):
            if call < self.calls and self.is_over(state, rank):
                own = [
                    (rank, (buffer,), chunk)
                    for buffer in ("in", "out") for chunk in range(self.plan.size_of(buffer))
                ]  # fmt: skip
                yield ("begin", rank), frozenset(), frozenset(own)
        for lane, (rank, _) in enumerate(self.lanes):
            if not calls[rank] or taken[lane] == len(self.steps(lane)):
                continue
            step = self.steps(lane)[taken[lane]]
            queue = queues[step.channel] if step.channel is not None else ()
            if step.op == "wait" and (not queue or queue[0] != "signal"):
                continue
            if step.op == "flush" and any(entry != "signal" and entry[0] == "asked" for entry in queue):
                continue
            if step.op == "pend" and not posts.get((rank, step.semaphore)):
                continue
            reads, writes = [], []
            if step.op in ("copy", "reduce"):
                for place in step.src:
                    reads += self.cells(rank, calls[rank] - 1, place, step.n)
                writes = self.cells(rank, calls[rank] - 1, step.dst, step.n)
            yield ("step", lane), frozenset(reads), frozenset(writes)
        for channel, queue in enumerate(queues):
            ends = self.plan.channels[channel]
            for at, entry in enumerate(queue):
                if entry == "signal":
                    continue
                stage, step, call = entry[:3]
                if stage == "asked":
                    cells = self.cells(ends.source, call, step.src[0], step.n)
                    yield ("read", channel, at), frozenset(cells), frozenset()
                else:
                    cells = self.cells(ends.target, call, step.dst, step.n)
                    yield ("land", channel, at), frozenset(), frozenset(cells)

    def refuse_races(self, actions: list[Action]) -> None:
        for i, (one, reads, writes) in enumerate(actions):
            for other, more_reads, more_writes in actions[:i]:
                if writes & (more_reads | more_writes) or reads & more_writes:
                    raise WrongError(f"race of {one} and {other}")

    def take(self, name, state, memory, posts):
        calls, taken, queues = (list(each) for each in state)
        memory, posts = dict(memory), dict(posts)
        if name[0] == "begin":
            rank = name[1]
            if calls[rank]:
                self.judge(rank, calls[rank] - 1, memory)
            for chunk in range(self.plan.in_chunks):
                memory[rank, ("in",), chunk] = ("in", rank, chunk, calls[rank])
            for chunk in range(self.plan.out_chunks):
                memory.pop((rank, ("out",), chunk), None)
            calls[rank] += 1
            for lane, (r, _) in enumerate(self.lanes):
                if r == rank:
                    taken[lane] = 0
        elif name[0] == "step":
            lane = name[1]
            rank = self.lanes[lane][0]
            step = self.steps(lane)[taken[lane]]
            taken[lane] += 1
            self.run(rank, calls[rank] - 1, step, queues, memory, posts)
        else:
            _, channel, at = name
            queue = list(queues[channel])
            _, step, call, *values = queue[at]
            ends = self.plan.channels[channel]
            if name[0] == "read":
                source = self.cells(ends.source, call, step.src[0], step.n)
                queue[at] = ("read", step, call, *(self.value(memory, cell) for cell in source))
            else:
                del queue[at]
                target = self.cells(ends.target, call, step.dst, step.n)
                memory.update(zip(target, values, strict=True))
            queues[channel] = tuple(queue)
        return (tuple(calls), tuple(taken), tuple(queues)), memory, posts

    def run(self, rank: int, call: int, step: Step, queues, memory, posts) -> None:
        key = rank, step.semaphore
        if step.op == "put":
            queues[step.channel] += (("asked", step, call),)
        elif step.op == "signal":
            queues[step.channel] += ("signal",)
        elif step.op == "wait":
            queues[step.channel] = queues[step.channel][1:]
        elif step.op in ("post", "pend"):
            posts[key] = posts.get(key, 0) + (1 if step.op == "post" else -1)
        elif step.op in ("copy", "reduce"):
            sources = [self.cells(rank, call, place, step.n) for place in step.src]
            columns = zip(*sources, strict=True)
            values = [total([self.value(memory, cell) for cell in column]) for column in columns]
            memory.update(zip(self.cells(rank, call, step.dst, step.n), values, strict=True))

    def value(self, memory, cell):
        if cell not in memory:
            raise WrongError(f"{cell} is undefined")
        return memory[cell]

    def judge(self, rank: int, call: int, memory) -> None:
        """Raise WrongError if a rank's result is not the correct result of the collective."""
        plan = self.plan
        for chunk in range(plan.out_chunks):
            other, c = divmod(chunk, plan.chunks)
            block = rank * plan.chunks
            at = {"all_gather": c, "all_to_all": block + c, "reduce_scatter": block + chunk}
            from_ranks = range(plan.ranks) if plan.collective in REDUCING else [other]
            wanted = sorted(("in", r, at.get(plan.collective, chunk), call) for r in from_ranks)
            found = self.value(memory, (rank, ("out",), chunk))
            if sorted(leaves(found)) != wanted:
                raise WrongError(f"out[{chunk}] of {rank} is {found}")
            first = self.sums.setdefault((call, chunk), found)
            if plan.collective == "all_reduce" and first != found:
                raise WrongError(f"out[{chunk}] of {rank} is {found}")


def leaves(value) -> list[tuple]:
    return [value] if value[0] == "in" else [leaf for part in value for leaf in leaves(part)]


def total(terms: list):
    """Return a sum as a tuple of terms with the first two terms sorted, as their order has no effect."""
    if len(terms) == 1:
        return terms[0]
    every = [leaf for term in terms for leaf in leaves(term)]
    if len(set(every)) < len(every) or len({leaf[2] for leaf in every}) > 1:
        raise WrongError(f"the sum of {terms}")
    return (*sorted(terms[:2], key=repr), *terms[2:])
