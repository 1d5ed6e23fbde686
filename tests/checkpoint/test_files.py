"""A flipped bit that changes a tensor is detected, and a failed write keeps the old checkpoint file."""

import errno
import os

import pytest
import torch

from fairseq_tutel.checkpoint import atomic_save, files
from fairseq_tutel.files import is_temporary

CONTENT = {"weight": torch.arange(12.0), "step": 3}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "checkpoint_1_2.pt"
    torch.save(CONTENT, path)
    return path


def test_only_copies_of_a_checkpoint_file_have_the_same_identity(path, tmp_path):
    own, copy = files.identity(str(path)), tmp_path / "copy.pt"
    copy.write_bytes(path.read_bytes())
    assert files.identity(str(copy)) == own
    other = {"weight": CONTENT["weight"] + 1, "step": 3}
    for old in (False, True):
        torch.save(other, path, _use_new_zipfile_serialization=not old)
        assert files.identity(str(path)) != own


def test_a_checkpoint_whose_path_is_not_utf_8_can_be_checked_and_opened(path, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    moved = path.rename(folder / path.name)
    assert files.is_whole(str(moved)) and files.has_an_end(str(moved))
    assert torch.equal(files.read_file(moved, "INPUT")["weight"], CONTENT["weight"])


def test_a_truncated_checkpoint_file_is_reported_as_corrupt(path):
    content = path.read_bytes()
    for size in range(0, len(content), 21):
        path.write_bytes(content[:size])
        assert not files.has_an_end(str(path)), size
        assert not files.is_whole(str(path)), size


def test_a_flipped_bit_fails_the_file_check_or_does_not_change_a_tensor(path):
    content, harmless = path.read_bytes(), 0
    # This bit in the attributes of the zip directory's first entry marks the entry as a folder.
    folder = 8 * (content.index(b"PK\x01\x02") + 38) + 4
    tried = [folder, *range(0, 8 * len(content), 23)]
    for at in tried:
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        if files.is_whole(str(path)):
            # Some bits have no effect, such as bits of dates and bits of the padding between tensors.
            loaded = torch.load(path)
            assert torch.equal(loaded["weight"], CONTENT["weight"]), at
            assert loaded["step"] == CONTENT["step"], at
            harmless += 1
    assert harmless < 0.6 * len(tried)


def test_the_checkpoint_format_from_before_torch_1_6_is_accepted(path):
    torch.save(CONTENT, path, _use_new_zipfile_serialization=False)
    assert files.is_whole(str(path))
    path.write_text("no checkpoint")
    assert not files.is_whole(str(path))


def test_a_checkpoint_file_without_check_sums_passes_the_check(path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CONTENT, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert files.is_whole(str(path))


def test_a_full_disk_raises_an_error_and_keeps_the_old_file(path, monkeypatch):
    def save(content, file):
        file.write(b"some bytes")
        raise RuntimeError("unexpected") from OSError(errno.ENOSPC, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"checkpoint_1_2\.pt could not be written: No space left") as caught:
        atomic_save.save(CONTENT, str(path))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(path.parent) == [path.name]
    assert path.read_bytes() == before


def test_two_processes_that_write_a_file_use_different_temporary_files(path):
    with atomic_save.replacing(str(path)) as first, atomic_save.replacing(str(path)) as second:
        assert first != second
        for name in (first, second):
            assert is_temporary(os.path.basename(name))
            atomic_save.write(CONTENT, name)
    assert os.listdir(path.parent) == [path.name]
    assert not is_temporary(path.name)
    assert not is_temporary(f"{path.name}.tmp")  # Other programs also write .tmp files.


def test_a_written_checkpoint_file_is_flushed_to_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    atomic_save.write(CONTENT, tmp_path / "a.pt")
    assert synced == [(tmp_path / "a.pt").stat().st_size]
