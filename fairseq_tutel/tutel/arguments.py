"""Arguments in Tutel's form: refused in one sentence, or, where they change no result here, said once."""

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from fairseq_tutel.moe.checks import require
from fairseq_tutel.moe.config import OVERLAP
from fairseq_tutel.moe.options import Rule
from fairseq_tutel.planning.strategy import Strategy
from fairseq_tutel.ranks.groups import Topology

logger = logging.getLogger(__name__)

TRUE_OR_FALSE: Rule = (lambda v: v in (True, False), "give True or False")


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number, `least` or more."""
    return _is_int(value) and value >= least


def check(name: str, value: Any, rule: Rule) -> None:
    """Refuse a value that breaks its rule, whatever its type."""
    try:
        holds = rule[0](value)
    except TypeError:
        holds = False
    require(holds, f"{name} is {value!r}; {rule[1]}.")


def check_keys(what: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a dict with a key of another kind of gate or experts, or of none."""
    for key in options:
        require(
            key in known, f"{what} has the key {key!r}; the keys it knows are {', '.join(known)}."
        )


def check_seeds(seeds: Any) -> tuple[int | None, int | None, int | None]:
    """Return (gate, experts, afterwards), None for those not given."""
    given = (None, None, None) if seeds is None else seeds
    fine = isinstance(given, tuple | list) and len(given) in (2, 3)
    fine = fine and all(seed is None or is_whole(seed, 0) for seed in given)
    require(
        fine,
        f"seeds is {seeds!r}; give (gate, experts, afterwards), each a whole number, at least 0, or None.",
    )
    gate, experts, after = (*given, None)[:3]
    return gate, experts, after


def count_experts(per_device: Any, group: dist.ProcessGroup | None = None) -> int:
    """Return E from `num_experts_per_device`.

    Args:
        per_device: n > 0 experts on each rank; -n or 1/n for one expert on every n ranks; -1 is 1.
        group: whose ranks are counted; None for all.

    Raises:
        ValueError: the number is none of these, or n does not divide the ranks.
    """
    per_rank = _as_whole(per_device)
    require(
        group is None or isinstance(group, dist.ProcessGroup),
        f"group is {group!r}; give a process group that this rank is in, or None for all ranks.",
    )
    ranks = count_ranks(group)
    if per_rank > 0 or per_rank == -1:
        return abs(per_rank) * ranks
    require(
        ranks % -per_rank == 0,
        f"num_experts_per_device is {per_device}, one expert on every {-per_rank} ranks, but there are "
        f"{ranks} ranks; give a divisor of {ranks}.",
    )
    return ranks // -per_rank


def count_ranks(group: dist.ProcessGroup | None = None) -> int:
    """Return the ranks of a group, None for all; 1 without torch.distributed."""
    together = dist.is_available() and dist.is_initialized()
    return dist.get_world_size(group) if together else 1


def _as_whole(per_device: Any) -> int:
    if isinstance(per_device, float) and 0 < per_device < 1:
        shared_by = round(1 / per_device)
        if abs(per_device * shared_by - 1) < 0.02:  # 0.33 is meant for a third
            return -shared_by
    require(
        is_whole(per_device, 1) or (_is_int(per_device) and per_device < 0),
        f"num_experts_per_device is {per_device!r}; give n experts on each rank, or -n or 1/n for one "
        "expert on every n ranks.",
    )
    return per_device


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@functools.cache
def say_no_effect(name: str, value: Any) -> None:
    """Log, once for each value, that an argument changes nothing."""
    logger.warning("%s is %r, which has no effect; results are the same without it.", name, value)


def say_copies(ranks: int) -> None:
    """Log where several ranks hold the same experts, whose gradients no rank has alone."""
    if ranks > 1:
        logger.warning(
            "%d ranks hold a whole copy of each expert; reduce its gradients over them, as "
            "fairseq_tutel.ranks.gradients.reduce_expert_gradients and docs/tutel.md do: a loop or "
            "optimizer that leaves experts out lets the copies drift apart.",
            ranks,
        )


def check_overlap(degree: Any) -> int:
    """Return `a2a_ffn_overlap_degree`: chunks in which rows travel while experts work."""
    check("a2a_ffn_overlap_degree", degree, OVERLAP)
    return degree


def check_switch(name: str, value: Any) -> bool:
    """Return a boolean, for which Tutel's users also give 0 or 1."""
    check(name, value, TRUE_OR_FALSE)
    return bool(value)


def check_megablocks(size: Any) -> None:
    """Take `megablocks_size`, 0 by default."""
    require(is_whole(size, 0), f"megablocks_size is {size!r}; give a whole number, at least 0.")
    if size > 0:
        say_no_effect("megablocks_size", size)


def check_strategy(
    degree: Any, parallel_type: Any, use_2dh: Any, shared_by: int, topology: Topology, slices: int
) -> Strategy:
    """Return how a layer runs.

    Args:
        degree: `a2a_ffn_overlap_degree`.
        parallel_type: of Tutel's.
        use_2dh: likewise.
        shared_by: ranks that hold one expert.
        topology: where experts live.
        slices: of an expert; 1 where each of those ranks has it whole.
    """
    if check_switch("use_2dh", use_2dh) and topology.grid is None:
        say_no_effect("use_2dh", True)
    text = parallel_type if isinstance(parallel_type, str) else ""
    adaptive = re.fullmatch(r"adaptive:(-?\d+)", text)
    require(
        adaptive is not None or text in ("data", "model", "auto"),
        f"parallel_type is {parallel_type!r}; choose one of adaptive:r (r a whole number), data, model, "
        "auto.",
    )
    wanted = int(adaptive[1]) if adaptive else (shared_by if text == "model" else 1)
    return Strategy(
        adaptive_r=_degree("parallel_type", parallel_type, wanted, shared_by, slices),
        overlap=check_overlap(degree),
        algorithm="2dh" if use_2dh else "linear",
    )


def check_adaptive(degree: Any, shared_by: int, slices: int) -> int:
    """Return `adaptive_r` of one call."""
    require(_is_int(degree), f"adaptive_r is {degree!r}; give a whole number, or None.")
    return _degree("adaptive_r", degree, degree, shared_by, slices)


def _degree(name: str, value: Any, degree: int, shared_by: int, slices: int) -> int:
    degree = min(max(degree, 0), shared_by)  # as Tutel does
    require(
        degree == 0 or shared_by % degree == 0,
        f"{name} is {value!r} but {shared_by} ranks hold one expert; give 0 or a divisor of {shared_by}.",
    )
    if degree > slices:
        say_no_effect(name, value)
    return min(degree, slices)
