"""The files of a checkpoint of Meta's moe branch: X-shared.pt, and X-rank-N.pt with rank N's experts."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.tools.convert.files import load
from fairseq_tutel.tools.convert.optimizer_state import SHARED

# What sharded data parallel puts before a name, and what it makes of weights that it flattens.
WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
FLAT = "flat_param"


@dataclass(frozen=True, kw_only=True)
class MetaFiles:
    """What is in the files.

    Attributes:
        prefix: X, as a path.
        shared: X-shared.pt, as it was loaded.
        ranks: every X-rank-N.pt, in order.
    """

    prefix: Path
    shared: dict[str, Any]
    ranks: list[dict[str, Any]]

    def state(self, file: int) -> dict[str, Any]:
        """Return what is in the file of a rank, or in that of SHARED."""
        return self.shared if file == SHARED else self.ranks[file]

    def path(self, file: int) -> Path:
        """Return the path of the same."""
        return shared_path(self.prefix) if file == SHARED else rank_path(self.prefix, file)

    @property
    def paths(self) -> list[Path]:
        """All paths."""
        return [self.path(file) for file in range(SHARED, len(self.ranks))]


def rank_path(prefix: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return prefix.with_name(f"{prefix.name}-rank-{rank}.pt")


def shared_path(prefix: Path) -> Path:
    """Return the file of all that is not an expert's."""
    return prefix.with_name(f"{prefix.name}-shared.pt")


def prefix_of(name: str) -> Path:
    """Return X from it, from X.pt, or from the name of one of the files."""
    path = Path(name)
    return path.with_name(re.sub(r"-(shared|rank-\d+)$", "", path.name.removesuffix(".pt")))


def open_files(name: str, flag: str = "--input") -> MetaFiles:
    """Open all files of a checkpoint; their tensors stay there until they are read.

    Args:
        name: X, X.pt, or one of the files.
        flag: of the command line that gives it.

    Raises:
        ValueError: a file is missing, torn, or of another kind.
    """
    prefix = prefix_of(name)
    shared = load(shared_path(prefix), flag)
    pattern = re.compile(re.escape(prefix.name) + r"-rank-(\d+)\.pt")
    found = [pattern.fullmatch(path.name) for path in prefix.parent.iterdir()]
    count = 1 + max((int(match[1]) for match in found if match), default=0)
    ranks = [load(rank_path(prefix, rank), flag) for rank in range(count)]
    files = MetaFiles(prefix=prefix, shared=shared, ranks=ranks)
    for file in range(SHARED, count):
        state = files.state(file)
        state["model"] = _unwrapped(state["model"], files.path(file), flag)
    return files


def _unwrapped(model: dict[str, Tensor], path: Path, flag: str) -> dict[str, Tensor]:
    """Return weights under the names that they have without sharded data parallel.

    Raises:
        ValueError: they are flattened: several in one tensor, in pieces.
    """
    unwrapped = {}
    for key, tensor in model.items():
        name = key.removeprefix("module.")
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if any(part.startswith(FLAT) for part in name.split(".")):
            raise ValueError(
                f"{flag} names {path}, which holds flattened weights ({key}) of a sharded training; save "
                "it from Meta's branch without --use-sharded-state."
            )
        unwrapped[name] = tensor
    return unwrapped
