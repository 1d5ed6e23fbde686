"""A teacher's answers in a folder: each of a sample of the data set, by its id, its tokens' in order.

Every process that writes appends to a file of its own, one whole record in one call, so that trainings may
fill a folder together and what is cut off is the end of a file. A record says of which text it is, and has
a check sum; a file's records are found by their heads alone, and read when their sample comes. Of several
to one sample any whole one is read. What the answers are of stands in about.json.

n tokens of a sample, K words of an answer.
"""

import hashlib
import json
import logging
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fairseq_tutel.checkpoint.files import temporary_of
from fairseq_tutel.distillation.loss import Answers
from fairseq_tutel.files.small import json_of

logger = logging.getLogger(__name__)

ABOUT, SUFFIX, VERSION = "about.json", ".answers", 2
MAGIC = b"ftKL"
# Magic, sample, n, fingerprint of its text, check sum of these and of the answers.
HEAD = struct.Struct("<4sqI16sI")
NUMBERS = (np.dtype("<i4"), np.dtype("<f4"))
FLAG = "--distill-logits"


def fingerprint(*texts: Tensor) -> bytes:
    """Return what tells a sample's tokens from others."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        wide, kind = (text.double(), "<f8") if text.is_floating_point() else (text, "<i8")
        digest.update(np.asarray(wide.cpu(), dtype=kind).tobytes() + b"|")
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    start: int
    tokens: int
    text: bytes
    check: int

    def content(self, sample: int, top_k: int) -> bytes | None:
        """Return the bytes of the answers; None where they, or their head, are damaged."""
        try:
            with self.path.open("rb") as file:
                content = os.pread(file.fileno(), 8 * self.tokens * top_k, self.start)
        except OSError:
            return None
        return content if _check(sample, self.tokens, self.text, content) == self.check else None


def _check(sample: int, tokens: int, text: bytes, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(HEAD.pack(MAGIC, sample, tokens, text, 0)))


class StoredLogits:
    """The answers of a folder, which is made where there is a teacher to fill it.

    Args:
        folder: of them.
        facts: what they are of, by what it is called in messages; the teacher is None where there is none.
        top_k: K.

    Raises:
        ValueError: the folder's are of something else, or it has none and there is no teacher.
    """

    def __init__(self, folder: str, facts: Mapping[str, Any], top_k: int) -> None:
        self.folder, self.top_k = Path(folder), top_k
        self._own: IO[bytes] | None = None
        self._places: dict[int, list[_Place]] = {}
        self._scanned: dict[Path, int] = {}
        self._refuse_others({"version": VERSION, **facts})

    def read(self, sample: int, text: bytes) -> Answers | None:
        """Return the answers to a sample, [n, K]; None where there are no whole ones.

        Args:
            sample: its id in the data set.
            text: the fingerprint of its tokens.

        Raises:
            ValueError: they are to other tokens.
        """
        found = self._whole(sample)
        if found is None:
            self._look()
            found = self._whole(sample)
        if found is None:
            return None
        place, content = found
        if place.text != text:
            raise ValueError(
                f"{FLAG} is {self.folder}, whose answers to sample {sample} are to another text: they are "
                "of another data set, of other --tokens-per-sample or --ignore-prefix-size, or of a task "
                "that draws its text anew in every epoch; give another folder, or leave it out."
            )
        half = len(content) // 2
        words, logs = (
            torch.from_numpy(np.frombuffer(part, kind).reshape(-1, self.top_k).copy())
            for part, kind in zip((content[:half], content[half:]), NUMBERS, strict=True)
        )
        return Answers(words.long(), logs)

    def _whole(self, sample: int) -> tuple[_Place, bytes] | None:
        places = self._places.get(sample, [])
        while places:
            content = places[-1].content(sample, self.top_k)
            if content is not None:
                return places[-1], content
            logger.warning("%s: the answers to sample %d are damaged", places.pop().path, sample)
        return None

    def write(self, sample: int, text: bytes, answers: Answers) -> None:
        """Append the answers to a sample; `read` of any process finds them from then on.

        Raises:
            ValueError: they could not be written, for example on a full disk.
        """
        parts = (answers.words_NK.cpu(), answers.logs_NK.float().cpu())
        content = b"".join(
            part.numpy().astype(kind).tobytes() for part, kind in zip(parts, NUMBERS, strict=True)
        )
        tokens = len(answers.words_NK)
        check = _check(sample, tokens, text, content)
        record = HEAD.pack(MAGIC, sample, tokens, text, check) + content
        try:
            if self._own is None:
                name = self.folder / f"{secrets.token_hex(8)}{SUFFIX}"
                self._own = name.open("xb", buffering=0)
            whole = self._own.write(record) == len(record)
        except OSError as error:
            raise ValueError(
                f"{FLAG} is {self.folder}, which can not be written: {error.strerror}."
            ) from error
        if not whole:  # nothing may follow it in this file
            raise ValueError(
                f"{FLAG} is {self.folder}, which can not be written: the disk is full."
            )

    def _refuse_others(self, facts: Mapping[str, Any]) -> None:
        path = self.folder / ABOUT
        if not path.exists():
            if facts["the teacher"] is None:
                raise ValueError(
                    f"{FLAG} is {self.folder}, which holds no teacher's answers; give --distill-teacher to "
                    "have them written."
                )
            self._begin(path, facts)
        try:
            found = json_of(path)
            is_ours = isinstance(found, dict)
        except (OSError, ValueError):
            is_ours = False
        if not is_ours:
            raise ValueError(
                f"{FLAG} is {self.folder}, whose {ABOUT} is damaged; give another folder."
            )
        for what, value in facts.items():
            if value is not None and found.get(what) != value:
                raise ValueError(
                    f"{FLAG} is {self.folder}, whose answers are of other facts than this run's: {what} "
                    f"was {found.get(what)} and is {value}; give another folder."
                )

    def _begin(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write what the folder is of; of several that do so at once the first one's stays."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            written = Path(temporary_of(str(path)))
            written.write_text(json.dumps(facts, indent=2) + "\n")
            try:
                os.link(written, path)
            except FileExistsError:
                pass
            finally:
                written.unlink()
        except OSError as error:
            raise ValueError(
                f"{FLAG} is {self.folder}, which can not be written: {error.strerror}."
            ) from error

    def _look(self) -> None:
        """Find the records that were appended since the last look, to any file."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            start, end = self._scanned.get(path, 0), path.stat().st_size
            if start + HEAD.size > end or not path.is_file():
                continue
            with path.open("rb") as file:
                while start + HEAD.size <= end:
                    head = os.pread(file.fileno(), HEAD.size, start)
                    magic, sample, tokens, text, check = HEAD.unpack(head)
                    size = HEAD.size + 8 * tokens * self.top_k
                    if magic != MAGIC or start + size > end:  # cut off, or still being written
                        break
                    place = _Place(path, start + HEAD.size, tokens, text, check)
                    self._places.setdefault(sample, []).append(place)
                    start += size
            self._scanned[path] = start
