"""Ends training with one sentence if a rank runs out of memory."""

import contextlib
from collections.abc import Iterator

from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.guard import CommunicationError


@contextlib.contextmanager
def refused_on_several_ranks(what: str) -> Iterator[None]:
    """Context manager that makes an out-of-memory error end the job if there are several ranks.

    fairseq would skip the batch on this rank only, and the others would wait in an all-to-all for ever.
    """
    try:
        yield
    except RuntimeError as error:
        is_of_memory = "out of memory" in str(error) and not isinstance(error, CommunicationError)
        if world.size() == 1 or not is_of_memory:
            raise
        raise MemoryError(
            f"rank {world.rank()} ran out of memory in {what}; lower --max-tokens or --batch-size, or "
            "add --checkpoint-activations."
        ) from error
