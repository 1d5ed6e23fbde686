"""Ends training with one sentence if a rank runs out of memory."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.guard import CommunicationError
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.loop import wrapping


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch means that a device has too little memory."""
    return "out of memory" in str(error) and not isinstance(error, CommunicationError)


@contextlib.contextmanager
def refused_on_several_ranks(what: str) -> Iterator[None]:
    """Context manager that makes an out-of-memory error end the job if there are several ranks.

    fairseq would skip the batch on this rank only, and the others would wait in an all-to-all for ever.
    """
    try:
        yield
    except RuntimeError as error:
        topology = RUN.topology
        if topology.world_size == 1 or not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"rank {topology.rank} ran out of memory in {what}; lower --max-tokens or --batch-size, or "
            "add --checkpoint-activations."
        ) from error


@contextlib.contextmanager
def refused_in_training(main: Any) -> Iterator[None]:
    """Context manager that explains out-of-memory errors of fairseq's training loop, which end the run.

    They occur outside of forward and backward passes, for example in the optimizer step.
    """
    with wrapping(main, train=_explained):
        yield


def _explained(original: Any) -> Any:
    @functools.wraps(original)
    def train(cfg: Any, trainer: Any, *args: Any) -> Any:
        try:
            return original(cfg, trainer, *args)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(
                f"rank {world.rank()} ran out of memory in training, after {trainer.get_num_updates()} "
                "updates; lower --max-tokens or --batch-size, add --checkpoint-activations, or, if the "
                "model has experts, keep its optimizer state in host memory with --moe-offload-optimizer."
            ) from error

    return train
