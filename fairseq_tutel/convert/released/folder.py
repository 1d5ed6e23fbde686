"""Reads a Hugging Face folder, which has a config.json, and weights in one or several files.

A Hugging Face folder has weights in these files, in order of preference:

- model.safetensors, or model.safetensors.index.json with the files that it names
- pytorch_model.bin, or pytorch_model.bin.index.json with the files that it names

Tensors are memory-mapped. No pickled code is executed: a .bin file is opened with torch's weights_only.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.files import read_file
from fairseq_tutel.files import json_of, shown

CONFIG = "config.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"


class ReleasedFolder:
    """An open folder with at most one open weight file. Tensors stay valid when their file is closed.

    Raises:
        ValueError: a file is missing or corrupt; all methods of ReleasedFolder may raise this error.
    """

    def __init__(self, path: Path, flag: str = "INPUT") -> None:
        self.path, self.flag = path, flag
        if not path.is_dir():
            raise ValueError(f"{flag} is {path}, which is not a folder; give a folder with {CONFIG}.")
        self._open: tuple[str, Any] | None = None  # The name and content of the open weight file.
        self._verified: set[str] = set()  # Names of files with verified checksums.

    def json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file in the folder, which must be a JSON object."""
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
        """Return whether the folder has a regular file of this name."""
        return (self.path / name).is_file()

    def names(self) -> list[str]:
        """Return the names of all tensors in the order of the weight files."""
        return sorted(self._files, key=self._files.__getitem__)

    def read(self, name: str) -> Tensor:
        """Return a memory-mapped tensor; its weight file stays open until another file is read."""
        if name not in self._files:
            raise ValueError(f"{self.flag} {self.path} has no tensor {name}; give a complete folder.")
        file = self._files[name]
        content = self._content(file)
        try:
            found: Tensor = content[name] if isinstance(content, dict) else content.get_tensor(name)
        except Exception as error:  # safetensors has a separate error type.
            raise _corrupt(self.path / file, error) from error
        return found

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """Dictionary from each tensor's name to the tensor's file."""
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
            # The index file is untrusted, so it may name only files in the folder of the index.
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
                raise ValueError(
                    f"{self.path / index} names the file {shown(file)} for {shown(name)}, which is not a "
                    f"{suffix} file in the folder; give another folder."
                )
        return where

    def _content(self, file: str) -> Any:
        """Return the content of a weight file: a state dict or an open safetensors file."""
        if self._open is None or self._open[0] != file:
            self._open, path = None, self.path / file
            if path.suffix == ".bin":
                content = read_file(path, self.flag, file not in self._verified)
                values = content.values() if isinstance(content, dict) else [None]
                if not all(isinstance(value, Tensor) for value in values):
                    raise ValueError(f"{self.flag} names {path}, which is not a state dict; give another.")
            else:
                content = _safetensors(path)
            self._verified.add(file)
            self._open = file, content
        return self._open[1]


def _safetensors(path: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return ValueError(f"{path} is corrupt or lacks a tensor ({reason}); replace the file.")
