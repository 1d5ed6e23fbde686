"""Reads a folder in the format of Hugging Face: config.json, and weights in one or several files.

These forms are supported, in this order of preference:

- model.safetensors, or model.safetensors.index.json with the files that it names
- pytorch_model.bin, or pytorch_model.bin.index.json with the files that it names

Tensors are memory-mapped. No pickled code runs: a .bin file is opened with torch's weights_only.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fairseq_tutel.checkpoint.files import read_file
from fairseq_tutel.files import json_of, shown

CONFIG = "config.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"


class _Shard(Protocol):
    def keys(self) -> Any: ...

    def get_tensor(self, name: str) -> Tensor: ...


class ReleasedFolder:
    """An open folder. One weight file is open at a time; use it as a context manager to close the file.

    Raises:
        ValueError: in all methods, if a file is missing or corrupt; the message is one sentence.
    """

    def __init__(self, path: Path, flag: str = "INPUT") -> None:
        self.path, self.flag = path, flag
        if not path.is_dir():
            raise ValueError(f"{flag} is {path}, which is not a folder; give a folder with {CONFIG}.")
        self._open: tuple[str, Any, _Shard] | None = None  # file name, context manager, content
        self._verified: set[str] = set()  # files whose checksums were compared

    def __enter__(self) -> "ReleasedFolder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the open weight file. Tensors that were read stay valid."""
        if self._open is not None:
            _, manager, _ = self._open
            self._open = None
            manager.__exit__(None, None, None)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return self.json(CONFIG)

    def json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file in the folder, which must be an object."""
        path = self.path / name
        try:
            found = json_of(path)
        except FileNotFoundError:
            raise ValueError(
                f"{self.flag} is {self.path}, which has no {name}; give a folder in the format of Hugging "
                "Face."
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as JSON ({error}); give another folder.") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path} holds no JSON object; give another folder.")
        return found

    def has(self, name: str) -> bool:
        """Return whether the folder has an ordinary file of this name."""
        return (self.path / name).is_file()

    def shards(self) -> dict[str, list[str]]:
        """Return the names of the tensors in each weight file, in the order of the index."""
        found: dict[str, list[str]] = {}
        for name, file in self._files.items():
            found.setdefault(file, []).append(name)
        return found

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def read(self, name: str) -> Tensor:
        """Return a tensor, memory-mapped; its weight file stays open until another file is needed."""
        if name not in self._files:
            raise ValueError(f"{self.flag} {self.path} has no tensor {name}; give a complete folder.")
        file = self._files[name]
        content = self._content(file)
        try:
            return content.get_tensor(name)
        except Exception as error:  # safetensors raises its own type, and torch many
            raise _corrupt(self.path / file, error) from error

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """The file of each tensor."""
        for whole in WHOLE:
            if self.has(whole):
                return dict.fromkeys(self._content(whole).keys(), whole)
            if self.has(whole + INDEX):
                return self._indexed(whole)
        raise ValueError(
            f"{self.flag} is {self.path}, which has neither {' nor '.join(WHOLE)} nor an index of them; "
            "give a folder with weights."
        )

    def _indexed(self, whole: str) -> dict[str, str]:
        index = whole + INDEX
        where = self.json(index).get("weight_map")
        suffix = Path(whole).suffix
        if not isinstance(where, dict) or not where:
            raise ValueError(f"{self.path / index} has no weight_map; give another folder.")
        for name, file in where.items():
            # An untrusted index may name only files in its folder.
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
                raise ValueError(
                    f"{self.path / index} names the file {shown(file)} for {shown(name)}, which is not a "
                    f"{suffix} file in the folder; give another folder."
                )
        for file in dict.fromkeys(where.values()):
            if not self.has(file):
                raise ValueError(
                    f"{self.flag} {self.path} lacks the file {file} that {index} names; add the file."
                )
        return where

    def _content(self, file: str) -> _Shard:
        """Open a weight file, and close the one that was open."""
        if self._open is None or self._open[0] != file:
            self.close()
            path = self.path / file
            is_new = file not in self._verified
            manager = _Pickled(path, self.flag, is_new) if path.suffix == ".bin" else _safetensors(path)
            self._verified.add(file)
            self._open = file, manager, manager.__enter__()
        return self._open[2]


def _safetensors(path: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise _corrupt(path, error) from error


class _Pickled:
    """The content of a .bin file, with the same methods as a safetensors file."""

    def __init__(self, path: Path, flag: str, verify: bool) -> None:
        self._tensors = read_file(path, flag, verify)
        if not isinstance(self._tensors, dict) or not all(
            isinstance(value, Tensor) for value in self._tensors.values()
        ):
            raise ValueError(f"{flag} names {path}, which is not a state dict; give another folder.")

    def __enter__(self) -> "_Pickled":
        return self

    def __exit__(self, *error: Any) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor by its name."""
        found: Tensor = self._tensors[name]
        return found


def _corrupt(path: Path, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return ValueError(f"{path} is corrupt or lacks a tensor ({reason}); replace the file.")
