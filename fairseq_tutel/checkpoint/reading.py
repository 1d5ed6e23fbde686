"""Opens files of torch.save safely: no pickled code runs, and corrupt files are refused."""

import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.files import (
    CORRUPT,
    has_an_end,
    is_whole,
    let_checkpoints_load,
    refused_class,
    system_error,
    unlike_a_file,
)

# A class in checkpoints of speech tasks. It is imported on demand, since fairseq takes seconds to import.
DICTIONARY = "fairseq.data.dictionary.Dictionary"


def read_file(path: Path, flag: str, verify: bool = True) -> Any:
    """Return the content of a file of torch.save; its tensors are mapped from the file.

    Args:
        path: the file.
        flag: the argument that names it, for errors.
        verify: compare all bytes with the checksums, so that no valid file is made of a corrupt one.

    Raises:
        ValueError: the file is missing, corrupt or of another kind.
    """
    let_checkpoints_load()
    if (kind := unlike_a_file(path)) is not None:
        raise ValueError(f"{flag} names {path}, which is {kind}; give a checkpoint file.")
    if not path.is_file():
        raise ValueError(f"{flag} names {path}, which does not exist.")
    fix = "leave it out, or give another" if flag == "--inputs" else "give another file"
    # A compressed entry could expand without limit.
    if zipfile.is_zipfile(path) and not has_an_end(str(path)):
        raise ValueError(f"{flag} names {path}, which is corrupt or no checkpoint; {fix}.")
    try:
        content = _loaded(path)
    except Exception as error:  # torch raises many types for unreadable files
        cause = system_error(error)
        if cause is not None:
            reason = f"which cannot be read ({cause.strerror}); fix that, or {fix}"
            raise ValueError(f"{flag} names {path}, {reason}.") from error
        refused = refused_class(error)
        holds = f" (it holds {refused}, which is not run)" if refused else ""
        raise ValueError(
            f"{flag} names {path}, which is corrupt or no checkpoint{holds}; {fix}."
        ) from error
    if verify and not is_whole(str(path)):
        raise ValueError(f"{flag} names {path}, which {CORRUPT}; {fix}.")
    return content


def _loaded(path: Path) -> Any:
    def load() -> Any:
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)

    try:
        return load()
    except Exception as error:
        if refused_class(error) != DICTIONARY or not find_spec("fairseq"):
            raise
    module, _, name = DICTIONARY.rpartition(".")
    let_checkpoints_load(getattr(import_module(module), name))
    return load()
