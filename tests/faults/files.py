"""The files of a save dir: which checkpoints are whole, what they hold, and how one of them gets torn."""

import random
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint import folders, shards

EXPERT = re.compile(r"\.experts\.fc\d_(?:weight|bias)$")


def checkpoints(save_dir: Path) -> list[Path]:
    """Return the checkpoint files; what is half written has another ending, and crash.pt is one rank's."""
    return sorted(p for p in save_dir.glob("*.pt") if p.name != "crash.pt")


def problem_of(path: Path, num_experts: int) -> str | None:
    """Return what is wrong with a checkpoint, or None: it opens, is finite and holds every expert."""
    try:
        content = torch.load(path, weights_only=False)
        tensors = weights(path, content)
    except Exception as error:
        return f"{path.name} does not open: {type(error).__name__}: {error}".splitlines()[0]
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            return f"{path.name} has NaN or infinite numbers in {name}"
    experts = {n: t for n, t in tensors.items() if EXPERT.search(n)}
    if not experts:
        return f"{path.name} has no experts"
    if any(len(t) != num_experts for t in experts.values()):
        return f"{path.name} does not hold {num_experts} experts"
    return None


def updates_of(path: Path) -> int:
    """Return after how many updates a checkpoint was saved."""
    return torch.load(path, weights_only=False)["optimizer_history"][-1]["num_updates"]


def newest(paths: Iterator[Path] | list[Path]) -> Path | None:
    """Return the checkpoint with the most updates."""
    return max(paths, key=updates_of, default=None)


def weights(path: Path, content: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Return a checkpoint's model and optimizer tensors by name, those in its shards included."""
    content = torch.load(path, weights_only=False) if content is None else content
    for part in (content["model"], content.get("last_optimizer_state", {})):
        shards.bind(part, path)
        shards.unbind(part)
    tensors = dict(content["model"])
    states = content.get("last_optimizer_state", {}).get("state", {})
    for index, state in states.items():
        tensors |= {f"{index}.{k}": v for k, v in state.items() if torch.is_tensor(v)}
    return tensors


def belongs(path: Path, checkpoint: Path) -> bool:
    """Whether a file is a checkpoint's own, or one of the shards that it names."""
    return path == checkpoint or path.parent.name in folders.mentions(checkpoint)


def _bytes_read(path: Path) -> list[int]:
    """Return where the bytes lie that a reader looks at: torch pads between the members of its zip."""
    if not zipfile.is_zipfile(path):
        return list(range(path.stat().st_size))
    content, places = path.read_bytes(), []
    for member in zipfile.ZipFile(path).infolist():
        # A local header: 30 bytes, of which the last four are the lengths of the name and the padding.
        sizes = content[member.header_offset + 26 : member.header_offset + 30]
        start = member.header_offset + 30 + sum(struct.unpack("<2H", sizes))
        places += range(start, start + member.file_size)
    return places


def tear(how: str, save_dir: Path) -> Path:
    """Break one file of a folder, or of the folders in it; return which.

    Args:
        how: flip (one bit that is read) or remove.
        save_dir: the folder.
    """
    rng = random.Random(1)
    files = sorted(p for p in save_dir.rglob("*") if p.is_file() and not p.is_symlink())
    # Half of the trials hit what the next training reads.
    read = [p for p in files if "checkpoint_last" in str(p.relative_to(save_dir))]
    path = rng.choice(read if read and rng.random() < 0.5 else files)
    content = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
        return path
    content[rng.choice(_bytes_read(path))] ^= 1 << rng.randrange(8)
    # A new file: copies on one disk may share their bytes.
    path.unlink()
    path.write_bytes(content)
    return path
