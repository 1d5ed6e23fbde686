"""Pipelining: chunks of rows travel while the experts work on others, forward and backward.

R rows, D model_dim. On the timeline of a forward with d = 3 chunks (t: there, x: experts, b: back):

    exchange  t0 t1 t2 b0 b1 b2
    experts      x0 x1 x2

The backward is the same in reverse, since autograd runs what came last first: all the gradients of the
way back are under way before the first expert needs one.

Source: Tutel (Hwang et al. 2023), section 3.3.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq_tutel.comm.trip import Trip

# Maps the rows that arrived in chunk i to as many rows that go back.
Stage = Callable[[int, Tensor], Tensor]


def run(chunks: Sequence[Tensor], trips: Sequence[Trip], stage: Stage) -> Tensor:
    """Send every chunk on its trip, apply `stage` where it arrives, and return all rows in order.

    Args:
        chunks: [R_i, D] each, in the order of their destination ranks.
        trips: of each chunk.
        stage: see `Stage`.
    """
    if len(chunks) == 1:
        (chunk,), (trip,) = chunks, trips
        return trip.back(stage(0, trip.there(chunk)))
    leaving = [trip.start(chunk, False) for chunk, trip in zip(chunks, trips, strict=True)]
    returning = [
        trip.start(stage(i, started.finish()), True)
        for i, (started, trip) in enumerate(zip(leaving, trips, strict=True))
    ]
    return torch.cat([started.finish() for started in returning])
