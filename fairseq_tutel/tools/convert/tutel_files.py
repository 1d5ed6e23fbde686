"""Files that Tutel's users save: one of each rank, by a pattern, with the weights somewhere within."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.tools.convert.files import load_any

Weights = dict[str, Tensor]


def rank_file(pattern: str, rank: int, size: int) -> Path:
    """Return the file of a rank: {rank} and {size} are filled in, or RANK-of-SIZE is added."""
    if "{rank}" not in pattern:
        pattern += "{rank}-of-{size}"
    return Path(pattern.replace("{rank}", str(rank)).replace("{size}", str(size)))


def input_file(pattern: str, rank: int, size: int) -> Path:
    """Return the file of a rank to read; of one rank alone the pattern may be its whole name."""
    whole = Path(pattern)
    return whole if size == 1 and whole.is_file() else rank_file(pattern, rank, size)


def weights_in(
    state: Any, path: Path, namespace: str | None, flag: str
) -> tuple[Weights, list[str]]:
    """Return the weights in a file, and the keys that lead to them.

    Args:
        state: what the file holds.
        path: of the file.
        namespace: keys joined by /; None for `model` where there is one, else the file itself.
        flag: of the command line that names the file.

    Raises:
        ValueError: there are none.
    """
    if namespace is None:
        namespace = (
            "model" if isinstance(state, dict) and isinstance(state.get("model"), dict) else ""
        )
    keys, found = [key for key in namespace.split("/") if key], state
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not any(torch.is_tensor(value) for value in found.values()):
        raise ValueError(
            f"{flag} names {path}, which holds no weights{f' under {namespace}' if keys else ''}; give "
            "--namespace the keys that lead to them, joined by /."
        )
    return found, keys


def with_weights(state: Any, keys: list[str], weights: Weights) -> Any:
    """Return what a file holds with other weights; the rest is shared."""
    if not keys:
        return weights
    return {**state, keys[0]: with_weights(state[keys[0]], keys[1:], weights)}


def open_ranks(
    pattern: str, size: int, namespace: str | None, flag: str
) -> tuple[list[Weights], Any, list[str]]:
    """Open the files of all ranks; their tensors stay there until they are read.

    Returns:
        The weights of every rank, all of rank 0's file, and the keys that lead to the weights in it.

    Raises:
        ValueError: a file is missing, torn, or lacks a weight that another has.
    """
    ranks, first, keys = [], None, []
    for rank in range(size):
        path = input_file(pattern, rank, size)
        state = load_any(path, flag)
        weights, found = weights_in(state, path, namespace, flag)
        if rank == 0:
            first, keys = state, found
        ranks.append(weights)
        for name in ranks[0].keys() ^ weights.keys():
            lacking = path if name in ranks[0] else input_file(pattern, 0, size)
            raise ValueError(
                f"{flag} names {lacking}, which lacks {name}; give the files of one model."
            )
    return ranks, first, keys


def holders_of_tensors(state: Any, but: str | None) -> Iterator[str]:
    """Yield the keys of a dictionary, but one, that lead to tensors."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if key != but and _has_tensor(value):
            yield key


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensor(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_has_tensor(part) for part in value)
    return torch.is_tensor(value)
