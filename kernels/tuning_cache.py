"""A cache of kernel timings on disk.

There is one JSON file per GPU, Triton version and kernel source. Several ranks may write at the same time,
so a process merges the current content of the file and replaces the file atomically. If a file cannot be
read or written, one warning is logged and the kernels are measured again.
"""

import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.files.untrusted import json_of

logger = logging.getLogger(__name__)

LOCK_SECONDS = 2

# The timings of one entry: configuration -> milliseconds, or the error if the configuration cannot run.
Timings = dict[str, float | str]


class TuningCache:
    """The kernel timings of one device and one set of software versions, in memory and on disk.

    Args:
        path: the file; its directory is created at the first write.
        identity: the device and versions that the timings are valid for; a file with another identity is
            ignored.
    """

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        self.path, self.identity = path, identity
        self.entries: dict[str, Timings] = self._read()

    @classmethod
    def here(cls) -> "TuningCache":
        """Return the cache for the current device and this version of the kernels."""
        identity = identity_here()
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return cls(directory() / f"kernels-{digest[:16]}.json", identity)

    def add(self, entry: str, timings: Timings) -> None:
        """Add timings in memory and on disk, and load the timings that other processes added."""
        from filelock import FileLock  # imported late because the import takes 0.1 s

        self.entries.setdefault(entry, {}).update(timings)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=LOCK_SECONDS):
                for other, theirs in self._read().items():
                    self.entries[other] = {**theirs, **self.entries.get(other, {})}
                self._write()
        except (OSError, NotImplementedError) as error:  # NotImplementedError: file locks are unsupported
            reason = getattr(error, "strerror", None) or error
            _warn_once(f"kernel timings are not saved: {self.path} cannot be written ({reason})")

    def _read(self) -> dict[str, Timings]:
        try:
            content = json_of(self.path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _warn_once(f"kernels are measured again: {self.path} cannot be read ({error})")
            return {}
        if not _is_of(content, self.identity):
            _warn_once(f"kernels are measured again: {self.path} is not a valid timing file")
            return {}
        return content["entries"]

    def _write(self) -> None:
        content = {"identity": self.identity, "entries": self.entries}
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix=self.path.name, suffix=".part", delete=False
        ) as file:
            try:
                json.dump(content, file, indent=1)
                file.close()
                os.replace(file.name, self.path)
            except BaseException:
                os.unlink(file.name)
                raise


def directory() -> Path:
    """Return the cache directory: $FAIRSEQ_TUTEL_CACHE, or fairseq_tutel in the user's cache directory."""
    given = os.environ.get("FAIRSEQ_TUTEL_CACHE")
    if given:
        return Path(given)
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(users) / "fairseq_tutel"


def identity_here() -> dict[str, str]:
    """Return the device name and the software versions that timings depend on."""
    device, arch = platform.machine(), "cpu"
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = facts.name
        arch = facts.gcnArchName if torch.version.hip else f"sm_{facts.major}{facts.minor}"
    return {
        "device": device,
        "arch": arch,
        "triton": _triton_version(),
        "source": _source_hash(),
    }


def _triton_version() -> str:
    """Return the version of the imported Triton, whose package has another name on ROCm."""
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


@functools.cache
def _source_hash() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _is_of(content: Any, identity: dict[str, str]) -> bool:
    if not isinstance(content, dict) or content.get("identity") != identity:
        return False
    entries = content.get("entries")
    return isinstance(entries, dict) and all(
        isinstance(timings, dict) and all(isinstance(t, float | int | str) for t in timings.values())
        for timings in entries.values()
    )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
