"""Places of an expert as Tutel counts them, for who compares the two digit by digit.

T tokens, E experts, K top_k.
"""

import torch
import torch.distributed as dist

from fairseq_tutel.moe.slots import Capacity
from fairseq_tutel.ranks.guard import guarded
from fairseq_tutel.tutel.arguments import require

# Above the first, Tutel takes for a multiple the next one of the second.
LARGE, COARSE = 256, 128


def tutel_capacity(
    factor: float, top_k: int, num_experts: int, num_tokens: int, multiple: int
) -> Capacity:
    """Return K * int(|factor| * ceil(T / E)) places, rounded up to a multiple; for 0 no limit.

    Raises:
        ValueError: that is no place, where Tutel stops with an error.
    """
    if factor == 0:
        return Capacity()
    places = top_k * int(abs(factor) * -(-num_tokens // num_experts))
    require(
        places > 0 or num_tokens == 0,
        f"capacity_factor is {factor!r}, which by tutel_capacity gives no place to {num_tokens} tokens on "
        f"{num_experts} experts; give a larger one, or leave tutel_capacity out.",
    )
    if multiple > LARGE:
        multiple = _up(multiple, COARSE)
    return Capacity(fixed=_up(places, multiple))


def most_tokens(num_tokens: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Return the largest number of tokens of any rank. Collective; waits for the device."""
    most = torch.tensor(num_tokens, device=device)
    with guarded("the agreement on the number of tokens", group):
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
