"""How many bytes of weights, gradients and optimizer state a rank holds, by formula.

With 2-byte weights and Adam, a parameter shared by D ranks costs 2 + (2 + 12) / D bytes under stage 2: D is
all W ranks for what every rank has, and W / P replicas for experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass


def partition_length(numel: int, size: int) -> int:
    """Return m, the elements of a rank's part with what pads the last ones."""
    return -(-numel // size)


@dataclass(frozen=True)
class Held:
    """Bytes of one rank between two collectives, without activations.

    Attributes:
        weights: of the model.
        gradients: after a backward, which is when they are most.
        state: on the device: what the optimizer keeps, fp32 masters included.
        host: the same in host memory.
    """

    weights: int = 0
    gradients: int = 0
    state: int = 0
    host: int = 0

    @property
    def device(self) -> int:
        """All that is on the device."""
        return self.weights + self.gradients + self.state

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.state + other.state,
            self.host + other.host,
        )


def held_bytes(
    dense: Iterable[int],
    experts: Iterable[int],
    world_size: int,
    expert_parallel_size: int,
    stage: int = 0,
    offload: bool = False,
    weight_bytes: int = 2,
    moments: int = 2,
) -> Held:
    """Return what a rank holds.

    Args:
        dense: elements of each parameter that every rank has.
        experts: elements of this rank's part of each expert parameter.
        world_size: W.
        expert_parallel_size: P.
        stage: of --moe-zero-stage.
        offload: of --moe-offload-optimizer.
        weight_bytes: 2 for bf16 and fp16, 4 for fp32.
        moments: fp32 numbers that the optimizer keeps of an element: 2 for Adam, 1 for SGD with momentum.
    """
    replicas = world_size // expert_parallel_size
    total = Held()
    for sizes, group in ((dense, world_size), (experts, replicas)):
        for numel in sizes:
            total += _held(numel, group if stage > 0 else 1, stage, offload, weight_bytes, moments)
    return total


def _held(
    numel: int, group: int, stage: int, offload: bool, weight_bytes: int, moments: int
) -> Held:
    own = partition_length(numel, group)
    gradient = weight_bytes * (own if stage == 2 else numel)
    half = weight_bytes < 4
    if half and stage == 0 and not offload:
        gradient += 4 * numel  # fairseq's own optimizer keeps a whole fp32 copy of them
    # An fp32 weight is updated where it is, but for a copy in host memory.
    state = own * 4 * (moments + (1 if half or offload else 0))
    return Held(
        weights=weight_bytes * numel,
        gradients=gradient,
        state=0 if offload else state,
        host=state if offload else 0,
    )
