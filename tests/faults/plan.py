"""What a trial does: a training run, one fault, and how the run is continued.

W ranks.
"""

from dataclasses import dataclass, field

# Of the whole training: updates, and how often it saves (and validates).
UPDATES = 8
SAVE_EVERY = 2
# A checkpoint that a trial may start from was saved after so many.
BEGUN = 4
MICRO_BATCHES = 4  # of an update, over all ranks

# Checkpoints in shards that threads write.
BACKGROUND = ("--moe-checkpoint", "sharded", "--moe-save-async")


@dataclass(frozen=True)
class Fault:
    """What happens to one rank of the first training.

    Attributes:
        what: kill, stop, error, signal, nan, empty (a batch), full (a disk), or "none".
        place: the name of a place in faulty_places.
        when: at the how-many-th visit of the place.
        rank: which rank.
        detail: which signal.
        fraction: how much of a file is written.
        target: "rank", "all" for a kill or signal of all ranks, or "torchrun" for a signal to it.
    """

    what: str = "none"
    place: str = "none"
    when: int = 1
    rank: int = 0
    detail: str = ""
    fraction: float = 0.0
    target: str = "rank"


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        kind: its name.
        ranks: W of the training that is hit.
        ranks_after: W of the training that goes on from what it left.
        flags: of both.
        begun: starts from a checkpoint.
        fault: what happens to a rank.
        tear: flip or remove: what happens to a file of the save dir before the training starts.
        disk: how many checkpoint files the disk holds; 0 for any number.
        compared: the weights at the end are compared with those of an undisturbed training.
    """

    kind: str
    ranks: int
    ranks_after: int
    flags: tuple[str, ...] = ()
    begun: bool = False
    fault: Fault = field(default_factory=Fault)
    tear: str = ""
    disk: float = 0.0
    compared: bool = False
