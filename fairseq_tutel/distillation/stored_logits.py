"""Stores a teacher's K most probable words of each token, and their log-probabilities, in a folder.

Each record holds one sample of the data set, and is found by the sample's ID.

- Every writing process appends to its own file, one record per call. Several runs may fill one folder. Only
  the end of a file can be truncated.
- A record has a header with a fingerprint of the text and a checksum. Headers are scanned first; contents
  are read when the sample is needed. If a sample has several records, any intact record is read.
- about.json describes the teacher and the options.

n tokens of a sample, K words per token.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from fairseq_tutel.distillation.loss import Answers
from fairseq_tutel.files.atomic import temporary_beside
from fairseq_tutel.files.untrusted import json_of

logger = logging.getLogger(__name__)

ABOUT, SUFFIX, VERSION = "about.json", ".answers", 2
MAGIC = b"ftKL"
# Magic, sample ID, n, fingerprint of the text, checksum of the header and the content.
HEAD = struct.Struct("<4sqI16sI")
WORD, LOG = np.dtype("<i4"), np.dtype("<f4")  # a record has all word IDs, then all log-probabilities
FLAG = "--distill-logits"


def fingerprint(*texts: Tensor) -> bytes:
    """Return a 16-byte hash of a sample's tokens, which may be in several tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        wide, kind = (text.double(), "<f8") if text.is_floating_point() else (text, "<i8")
        digest.update(np.asarray(wide.cpu(), dtype=kind).tobytes() + b"|")
    return digest.digest()


class _Record(NamedTuple):
    """The header of a stored record, and the position of the record's content in a file."""

    path: Path
    start: int
    tokens: int
    text: bytes
    check: int


def _check(sample: int, tokens: int, text: bytes, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(HEAD.pack(MAGIC, sample, tokens, text, 0)))


class StoredLogits:
    """Reads and writes teacher logits in a folder; the folder is created if a teacher is given.

    `facts` maps names of properties of the logits to their values. "the teacher" is None without a teacher.
    """

    def __init__(self, folder: str, facts: Mapping[str, Any], top_k: int) -> None:
        self.folder, self.top_k = Path(folder), top_k
        self._own: IO[bytes] | None = None
        self._records: dict[int, list[_Record]] = {}
        self._scanned: dict[Path, int] = {}
        self._refuse_others({"version": VERSION, **facts})

    def read(self, sample: int, text: bytes) -> Answers | None:
        """Return the stored logits of a sample, [n, K], or None if there is no intact record."""
        found = self._whole(sample)
        if found is None:
            self._look()
            found = self._whole(sample)
        if found is None:
            return None
        record, content = found
        if record.text != text:
            raise ValueError(
                f"{FLAG} is {self.folder}, whose probabilities of sample {sample} are for different text: "
                "the data set, --tokens-per-sample or --ignore-prefix-size differs, or the task samples "
                "new text in each epoch; give another folder, or remove --distill-logits."
            )
        pair_2nK = np.frombuffer(content, WORD).reshape(2, -1, self.top_k)
        logs_nK = pair_2nK[1].view(LOG).copy()
        return Answers(torch.from_numpy(pair_2nK[0].astype(np.int64)), torch.from_numpy(logs_nK))

    def _whole(self, sample: int) -> tuple[_Record, bytes] | None:
        """Return an intact record of a sample and the bytes of its content, or None if there is none."""
        records = self._records.get(sample, [])
        while records:
            record = records[-1]
            with contextlib.suppress(OSError), record.path.open("rb") as file:
                content = os.pread(file.fileno(), 8 * record.tokens * self.top_k, record.start)
                if _check(sample, record.tokens, record.text, content) == record.check:
                    return record, content
            logger.warning("%s: ignoring corrupt probabilities of sample %d", records.pop().path, sample)
        return None

    def write(self, sample: int, text: bytes, answers: Answers) -> None:
        """Append the logits of a sample to this process's file, so `read` finds them in any process."""
        words_nK, logs_nK = (part.cpu().numpy() for part in (answers.words_NK, answers.logs_NK.float()))
        content = words_nK.astype(WORD).tobytes() + logs_nK.astype(LOG).tobytes()
        tokens = len(answers.words_NK)
        check = _check(sample, tokens, text, content)
        record = HEAD.pack(MAGIC, sample, tokens, text, check) + content
        try:
            if self._own is None:
                name = self.folder / f"{secrets.token_hex(8)}{SUFFIX}"
                self._own = name.open("xb", buffering=0)
            whole = self._own.write(record) == len(record)
        except OSError as error:
            self._refuse_writing(error.strerror)
        if not whole:  # this file ends with a truncated record, so nothing may follow
            self._refuse_writing("the disk is full")

    def _refuse_writing(self, reason: str | None) -> NoReturn:
        raise ValueError(f"{FLAG} is {self.folder}, which cannot be written: {reason}.")

    def _refuse_others(self, facts: Mapping[str, Any]) -> None:
        path = self.folder / ABOUT
        if not path.exists():
            if facts["the teacher"] is None:
                raise ValueError(
                    f"{FLAG} is {self.folder}, which has no stored teacher probabilities; give "
                    "--distill-teacher to compute and store them."
                )
            self._begin(path, facts)
        found = None
        with contextlib.suppress(OSError, ValueError):
            found = json_of(path)
        if not isinstance(found, dict):
            raise ValueError(f"{FLAG} is {self.folder}, whose {ABOUT} is damaged; give another folder.")
        for what, value in facts.items():
            if value is not None and found.get(what) != value:
                raise ValueError(
                    f"{FLAG} is {self.folder}, whose probabilities were stored with other settings: {what} "
                    f"was {found.get(what)} and is now {value}; give another folder."
                )

    def _begin(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Create the folder and its about.json; if several processes do so, the first file is kept."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary_beside(path) as written, contextlib.suppress(FileExistsError):
                Path(written).write_text(json.dumps(facts, indent=2) + "\n")
                os.link(written, path)
        except OSError as error:
            self._refuse_writing(error.strerror)

    def _look(self) -> None:
        """Find the records that processes have appended to files of the folder since the last call."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            start, end = self._scanned.get(path, 0), path.stat().st_size
            if start + HEAD.size > end or not path.is_file():
                continue
            with path.open("rb") as file:
                while start + HEAD.size <= end:
                    head = os.pread(file.fileno(), HEAD.size, start)
                    magic, sample, *values = HEAD.unpack(head)
                    record = _Record(path, start + HEAD.size, *values)
                    after = record.start + 8 * record.tokens * self.top_k
                    if magic != MAGIC or after > end:  # truncated, or still being written
                        break
                    self._records.setdefault(sample, []).append(record)
                    start = after
            self._scanned[path] = start
