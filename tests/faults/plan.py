"""What a trial does, drawn from its seed alone: a training, one fault, and how it goes on afterwards.

W ranks.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

# Of the whole training: updates, and how often it saves (and validates).
UPDATES = 8
SAVE_EVERY = 2
# A checkpoint that a trial may start from was saved after so many.
BEGUN = 4
MICRO_BATCHES = 4  # of an update, over all ranks
SECONDS_OF_TORCHRUN = 12.0  # from its start to about the end of a training

# Where a rank can be hit, in faulty_places, and how often any rank comes by in a whole training; those of
# the ranks that write files count for these alone.
PLACES = {
    "start-up": {"import": 1, "joined": 1, "built": 1},
    "a load": {"read": 1, "restore": 1, "loaded": 1},
    "a step": {"train": 8, "backward": 8, "clip": 8, "update": 8},
    "a validation": {"valid": 4},
    "a save": {"gather": 4, "shard": 8, "write": 4, "rename": 11, "renamed": 11, "copy": 7, "saved": 4},
    "a background save": {"gather": 4, "shard": 8, "write": 4, "rename": 11, "renamed": 11, "copy": 7},
    "any collective": {"collective": 33},
}
# Where ranks exchange rows they come by more collectives: some trials go for those.
COLLECTIVES_OF_EXCHANGES = 200
OF_WRITERS = {"write", "rename", "renamed", "copy"}
OF_SHARDS = {"shard"}

# What trials have beside the tiny language model; one is drawn for each.
FLAGS = (
    (),
    ("--moe-expert-parallel-size", "1"),
    # four hold slices of experts
    ("--moe-expert-count", "2", "--moe-expert-parallel-size", "{most}"),
    ("--moe-expert-count", "6", "--moe-exchange", "padded"),
    ("--moe-a2a-ffn-overlap-degree", "2"),
    ("--moe-capacity-factor", "1", "--moe-balance-bias"),
    ("--moe-drop-policy", "rts", "--moe-capacity-factor", "1", "--moe-gate-noise", "1"),
    ("--checkpoint-activations", "--dropout", "0.1"),
    ("--bf16",),
    ("--optimizer", "moe_adam", "--lr", "0.01"),
    ("--keep-interval-updates", "1"),
    ("--moe-zero-stage", "1"),
    ("--moe-zero-stage", "2", "--moe-expert-parallel-size", "1", "--optimizer", "moe_adam", "--lr", "0.01"),
    ("--moe-offload-optimizer",),
    ("--moe-offload-optimizer", "--moe-zero-stage", "2", "--bf16"),
    ("--moe-expert-parallel-size", "{most}", "--moe-adaptive", "auto", "--moe-capacity-factor", "1"),
    ("--moe-expert-count", "12", "--moe-use-2dh", "--moe-local-size", "{node}"),
)  # fmt: skip
# With these another number of ranks gives other numbers: rounded ones, or Adam's of noise.
OF_ONE_W = {"--bf16", "--optimizer"}
# A tuner chooses by what it measures, so that another run's sums may round otherwise.
ROUNDED = {"--moe-adaptive"}

# Collectives by plans, and rows too where all ranks share experts: of none, of shared memory, of messages.
PLANS = ("none", "memory", "messages")
BY_PLANS = ("--moe-collective-plans", "{plans}")
ROWS_BY_PLANS = ("--moe-a2a-algorithm", "plan:linear_all_to_all")
OF_OTHER_ROWS = {"6", "--moe-adaptive", "--moe-use-2dh"}

# Checkpoints: in one file, in shards, or in shards that threads write.
FORMATS = {
    "full": ("--moe-checkpoint", "full"),
    "sharded": ("--moe-checkpoint", "sharded"),
    "background": ("--moe-checkpoint", "sharded", "--moe-save-async"),
}
# Two nodes, of which one is killed and another one joins, train as one does, so they have a sum's rounding.
NODES = "node lost and gained"
FLAGS_OF_NODES = ((), ("--moe-expert-count", "6"), ("--moe-zero-stage", "1"), ("--moe-balance-bias",))

TEARS = ("truncate", "flip", "empty", "remove")


@dataclass(frozen=True)
class Fault:
    """What happens to one rank of the first training.

    Attributes:
        what: kill, stop, delay, error, signal, node, nan, inf, empty or short (a batch), or "none".
        place: of PLACES, "samples", or "time": the parent strikes `seconds` after the start.
        when: at the how-many-th visit of the place.
        rank: which rank.
        seconds: of a delay, or to the parent's strike.
        detail: which error or signal; NaN in "input" or "weights"; "store": a rendezvous without a node.
        fraction: how much of a file is written, which of the weights.
        target: "rank", "all" for a kill or signal of all ranks, or "torchrun" for a signal to it.
        messages: ranks cannot share memory, so that plans run by messages.
    """

    what: str = "none"
    place: str = "none"
    when: int = 1
    rank: int = 0
    seconds: float = 0.0
    detail: str = ""
    fraction: float = 0.0
    target: str = "rank"
    messages: bool = False


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        seed: of all that is random in it.
        kind: what the table counts it under.
        ranks: W of the training that is hit.
        ranks_after: W of the training that goes on from what it left.
        flags: of both.
        begun: starts from a checkpoint.
        fault: what happens to a rank.
        tear: of TEARS: what happens to a file of the save dir before the training starts.
        disk: how many checkpoint files the disk holds; 0 for any number.
        compared: the weights at the end are compared with those of an undisturbed training.
    """

    seed: int
    kind: str
    ranks: int
    ranks_after: int
    flags: tuple[str, ...] = ()
    begun: bool = False
    fault: Fault = field(default_factory=Fault)
    tear: str = ""
    disk: float = 0.0
    compared: bool = False


def kinds() -> list[str]:
    """Return the kinds of trials; a seed's is the one that it is modulo their number."""
    kill, stop, late, failing, signals = (
        [f"{what} in {phase}" for phase in PLACES] for what in ("kill", "stop", "delay", "error", "signal")
    )
    torn = [f"{tear} a file" for tear in TEARS]
    others = ["nan", "inf", "full disk", "empty batch", "short batch", "other ranks"]
    timed = ["kill at any time", "stop at any time", "signal at any time", NODES]
    # In turns, so that a few trials in a row differ.
    columns = [kill, torn, failing, others, signals, stop, timed, late]
    longest = max(map(len, columns))
    return [column[i] for i in range(longest) for column in columns if i < len(column)]


def draw(seed: int, timeout: float, formats: tuple[str, ...] = (), plans: tuple[str, ...] = PLANS) -> Trial:
    """Return the trial of a seed.

    Args:
        seed: any whole number from 0.
        timeout: --moe-comm-timeout in seconds.
        formats: of FORMATS, to draw from; none leaves the options out.
        plans: of PLANS, to draw from.
    """
    rng = random.Random(seed)
    every = kinds()
    kind = every[seed % len(every)]
    what, _, where = kind.partition(" ")
    ranks = rng.choice((1, 2, 2, 3, 4) if _may_be_alone(kind) else (2, 2, 3, 4))
    flags = rng.choice(FLAGS if kind != NODES else FLAGS_OF_NODES)
    if where == "in a background save":
        formats = ("background",)
    if formats:
        flags = (*flags, *FORMATS[rng.choice(formats)])
    same = (rng.random() < 0.6 and kind != "other ranks") or what == "signal"
    after = ranks if same else rng.choice([w for w in (1, 2, 3, 4) if w != ranks])
    by = rng.choice(plans)
    begun = where in ("in a load", "a file") or (kind != "full disk" and rng.random() < 0.3)
    if kind == NODES:
        ranks, after, by, begun = 2, 1, "none", False
    if by != "none":
        flags = (*flags, *BY_PLANS, *(() if OF_OTHER_ROWS & set(flags) else ROWS_BY_PLANS))
    fault = _fault(rng, what, where, ranks, timeout, begun, "sharded" in flags)
    return Trial(
        seed=seed,
        kind=kind,
        ranks=ranks,
        ranks_after=after,
        flags=flags,
        begun=begun,
        fault=replace(fault, messages=by == "messages"),
        tear=what if where == "a file" else "",
        disk=rng.uniform(0.5, 5.0) if kind == "full disk" else 0.0,
        compared=_is_comparable(kind, ranks, after, flags, fault),
    )


def _may_be_alone(kind: str) -> bool:
    """Whether it says something where there is one rank: nobody waits for that one."""
    return not kind.startswith(("stop", "delay")) and "collective" not in kind


def _is_comparable(kind: str, ranks: int, after: int, flags: tuple[str, ...], fault: Fault) -> bool:
    if ranks == 1 and fault.what == "error" and fault.detail == "memory":
        return False  # a rank alone leaves the batch out, as fairseq does
    if kind in ("empty batch", "short batch"):
        return False  # trains on other data
    return ranks == after or not OF_ONE_W & set(flags)


def _fault(
    rng: random.Random, what: str, where: str, ranks: int, timeout: float, begun: bool, sharded: bool
) -> Fault:
    rank = rng.randrange(ranks)
    common: dict[str, Any] = {"what": what, "rank": rank, "fraction": rng.random()}
    phase = where.removeprefix("in ")
    if what == "signal":
        common["target"] = rng.choice(("rank", "all", "torchrun"))
        common["detail"] = rng.choice(("SIGTERM", "SIGUSR1"))
    elif what == "kill" and phase == "a background save":
        common["target"] = rng.choice(("rank", "all"))
    if phase in PLACES:
        place = rng.choice([name for name in PLACES[phase] if sharded or name not in OF_SHARDS])
        most = PLACES[phase][place]
        if place == "collective" and rng.random() < 0.5:
            most = COLLECTIVES_OF_EXCHANGES
        when = rng.randint(1, max(1, most // 2 if begun else most))
        if place in OF_WRITERS:
            common["rank"] = 0
        # Well below the time-out, or so far above that it has gone by.
        seconds = rng.choice((rng.uniform(0.1, 0.4) * timeout, timeout + rng.uniform(2, 3)))
        errors = ["sample", "disk"] + ["memory"] * (phase in ("a step", "a validation"))
        common.setdefault("detail", rng.choice(errors))
        return Fault(place=place, when=when, seconds=seconds, **common)
    if what in ("nan", "inf"):
        detail = rng.choice(("input", "weights"))
        return Fault(place="train", when=rng.randint(1, 4 if begun else 8), detail=detail, **common)
    if where == "batch":
        return Fault(place="samples", when=rng.randint(1, 4 if begun else 8), **common)
    if where == "at any time":
        longest = SECONDS_OF_TORCHRUN if common.get("target") == "torchrun" else 1.2
        return Fault(place="time", seconds=rng.uniform(0, longest), **common)
    if what == "node":
        detail = "store" if rank == 0 else rng.choice(("store", "agent"))
        common |= {"detail": detail, "when": rng.randint(1, 3)}
        return Fault(place="node", seconds=rng.uniform(0, 3), **common)
    if what == "other":
        common["what"] = "kill"
        return Fault(place="train", when=rng.randint(1, 4 if begun else 8), **common)
    return Fault()
