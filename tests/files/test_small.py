"""Small files from anybody: pipes, folders, devices, deep and large ones end in an error at once."""

import os
import socket

import pytest

from fairseq_tutel.checkpoint.lease import NAME, read, take
from fairseq_tutel.files.small import content_of, json_of, printable
from fairseq_tutel.kernels.tuning_cache import TuningCache


def test_a_deep_file_is_no_json(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nests too deeply"):
        json_of(path)
    assert read(str(path)) == (None, 0.0)
    assert TuningCache(path, {}).entries == {}


def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path, "/dev/zero", tmp_path / "socket"):
            with pytest.raises(OSError):
                content_of(path)
    assert TuningCache(tmp_path / "pipe", {}).entries == {}


def test_a_large_file_is_refused(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert content_of(path, largest=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        content_of(path, largest=4)


def test_a_pipe_as_lease_is_refused_by_its_name(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(OSError, match=f"{NAME} is no lease: it is no ordinary file; remove it"):
        take(str(tmp_path))


def test_control_characters_are_printed_as_escapes():
    assert printable("a\x1b[31m\x9b\r\u202eb\n\tä") == "a\\x1b[31m\\x9b\\r\\u202eb\n\tä"
