"""The shard files of a checkpoint: which there are, and whether they are whole."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint.shards import ShardedTensor


def shards_in(state: Any) -> list[ShardedTensor]:
    """Return the tensors of nested dictionaries and lists that lie in shard files."""
    if isinstance(state, ShardedTensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [found for part in state for found in shards_in(part)] if isinstance(state, list) else []


def described_shards(tensors: Iterable[ShardedTensor]) -> dict[str, Any]:
    """Return the folders of shard files, how many files there are, and their bytes.

    Their headers are read, which a cut-off file does not fit.

    Raises:
        ValueError: a file is torn, or lacks a tensor.
    """
    keys: dict[Path, set[str]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            keys.setdefault(tensor.root / tensor.folder / piece.file, set()).add(piece.key)
    for path, wanted in keys.items():
        _refuse_torn(path, wanted)
    return {
        "folders": sorted({str(path.parent) for path in keys}),
        "files": len(keys),
        "bytes": sum(path.stat().st_size for path in keys),
    }


def refuse_changed(tensors: Iterable[ShardedTensor]) -> None:
    """Read every expert, one after the other, and compare its digest.

    Raises:
        ValueError: one is not what was saved.
    """
    for tensor in tensors:
        for expert in range(tensor.shape[0]):
            tensor.read(expert, 1)


def _refuse_torn(path: Path, wanted: set[str]) -> None:
    from safetensors import SafetensorError, safe_open  # takes its time, and few need it

    try:
        with safe_open(path, framework="pt") as file:
            whole = wanted <= set(file.keys())
    except (OSError, SafetensorError):
        whole = False
    if not whole:
        raise ValueError(
            f"FILE keeps experts in {path}, which is torn; give an older checkpoint, or put the folder "
            "back that stood beside this one."
        )
