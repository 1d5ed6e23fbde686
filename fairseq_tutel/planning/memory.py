"""Bytes of weights, gradients and optimizer state of a rank.

With 2-byte weights, Adam and ZeRO stage 2, a parameter takes 2 + (2 + 12) / D bytes: D is W for dense
parameters, and the W / P replicas for experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass


def partition_length(numel: int, size: int) -> int:
    """Return m, the elements of a rank's part with padding."""
    return -(-numel // size)


@dataclass(frozen=True)
class Held:
    """Bytes of one rank between two collectives, without activations."""

    weights: int = 0
    gradients: int = 0  # after backward, at their maximum
    state: int = 0  # optimizer state on the device, with fp32 masters
    host: int = 0  # optimizer state in host memory

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.weights + self.gradients + self.state


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
    """Return the bytes of a rank.

    Args:
        dense: elements of each dense parameter.
        experts: elements of this rank's part of each expert parameter.
        world_size: W.
        expert_parallel_size: P.
        stage: --moe-zero-stage.
        offload: --moe-offload-optimizer.
        weight_bytes: 2 for bf16 and fp16, 4 for fp32.
        moments: fp32 numbers of an element in the optimizer: 2 for Adam, 1 for SGD with momentum.
    """
    half, weights, gradients, state = weight_bytes < 4, 0, 0, 0
    for sizes, ranks in ((dense, world_size), (experts, world_size // expert_parallel_size)):
        for numel in sizes:
            own = partition_length(numel, ranks if stage > 0 else 1)
            weights += weight_bytes * numel
            gradients += weight_bytes * (own if stage == 2 else numel)
            if half and stage == 0 and not offload:
                gradients += 4 * numel  # fairseq's optimizer keeps a whole fp32 copy
            # fp32 weights need no masters, except in host memory.
            state += 4 * own * (moments + (half or offload))
    on_device, on_host = (0, state) if offload else (state, 0)
    return Held(weights, gradients, on_device, on_host)
