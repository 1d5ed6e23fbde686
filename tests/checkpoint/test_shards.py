"""The tests read parts of shard files, damage shard files, and check which unused folders are deleted."""

import dataclasses
import itertools
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fairseq_tutel.checkpoint import folders
from fairseq_tutel.checkpoint.shards import (
    Piece,
    ShardedTensor,
    bind,
    digest,
    is_record,
    unbind,
    write_file,
)
from fairseq_tutel.parallel.groups import Slice, cut

FOLDER = "experts/0123456789abcdef"
PIECE = ["layer.0.safetensors", "0.0", "00"]


def write(root: Path, whole: Tensor, slicing: Slice, first: int = 0) -> ShardedTensor:
    """Write a stacked tensor with two experts per file; return a `ShardedTensor` of the files."""
    pieces = []
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for begin in range(0, len(whole), 2):
        file, values = f"layer.{begin}.safetensors", {}
        for e, i in itertools.product(range(begin, min(begin + 2, len(whole))), range(slicing.count)):
            value = cut(whole, slicing, i)[e].contiguous()
            values[f"{e}.{i}"] = value
            pieces.append(Piece(file, f"{e}.{i}", digest(value)))
        save_file(values, root / FOLDER / file)
    return ShardedTensor(
        root=root,
        folder=FOLDER,
        shape=tuple(whole.shape),
        dtype=whole.dtype,
        slicing=slicing,
        pieces=tuple(pieces),
    )


@pytest.mark.parametrize("saved, read", list(itertools.product((1, 2, 4), (1, 2, 4))))
@pytest.mark.parametrize("dim", [1, 2])
def test_reading_some_expert_shards_returns_a_slice_of_the_stacked_tensor(tmp_path, saved, read, dim):
    whole = torch.randn(5, 8, 4)
    slicing = Slice(saved, dim) if saved > 1 else Slice()
    wanted = Slice(read, dim) if read > 1 else Slice()
    tensor = write(tmp_path, whole, slicing)
    assert torch.equal(tensor.whole(), whole)
    for index in range(read):
        part = tensor.read(1, 3, wanted, index)
        assert torch.equal(part, cut(whole[1:4], wanted, index))
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes  # The slice holds no other values in memory.


def test_a_sharded_checkpoint_describes_expert_tensors_by_plain_records(tmp_path):
    whole = torch.randn(3, 4)
    record = write(tmp_path, whole, Slice(2, 1)).record()
    state = {"model": {"a": record, "b": torch.ones(1)}, "list": [record]}
    path = tmp_path / "checkpoint.pt"
    torch.save(state, path)
    again = torch.load(path, weights_only=True)
    assert is_record(again["model"]["a"])
    bind(again, path)
    assert again["model"]["a"].record() == record
    unbind(again)
    assert torch.equal(again["model"]["a"], whole)
    assert torch.equal(again["list"][0], whole)
    assert torch.equal(again["model"]["b"], torch.ones(1))


def test_only_the_requested_experts_are_read_from_shard_files(tmp_path):
    tensor = write(tmp_path, torch.randn(4, 2), Slice())
    (tmp_path / FOLDER / "layer.2.safetensors").write_bytes(b"nothing")
    tensor.read(0, 2)
    with pytest.raises(ValueError, match=r"layer\.2\.safetensors, which is corrupt or missing"):
        tensor.read(1, 2)


def test_a_missing_shard_file_raises_an_error_before_any_tensor_is_read(tmp_path):
    record = write(tmp_path, torch.randn(4, 2), Slice()).record()
    file = tmp_path / FOLDER / "layer.2.safetensors"
    for instead in (file.unlink, lambda: os.mkfifo(file)):  # Opening a FIFO would block.
        instead()
        with pytest.raises(ValueError, match=r"1 files are missing, such as layer\.2\.safeten"):
            bind({"a": record}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="move a sharded checkpoint together with that folder"):
        bind({"a": record}, tmp_path / "elsewhere" / "checkpoint.pt")


def test_a_flipped_bit_in_a_shard_file_is_detected(tmp_path):
    tensor = write(tmp_path, torch.randn(4, 2), Slice())
    file = tmp_path / FOLDER / "layer.0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"the tensor 1\.[01] differs from the saved tensor"):
        tensor.whole()


@pytest.mark.parametrize("shape", [(4, 2, 1), (4, 10**15)])
def test_no_memory_is_allocated_if_the_recorded_shape_differs_from_the_shard_files(tmp_path, shape):
    tensor = write(tmp_path, torch.randn(4, 2), Slice())
    with pytest.raises(ValueError, match=r"the tensor 0\.0 differs from the saved tensor"):
        dataclasses.replace(tensor, shape=shape).whole()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"expert_shards": 4}, "version 4"),
        ({"expert_shards": 2, "packing": "int3"}, "fairseq_tutel did not write"),
        ({"folder": "../../etc"}, "fairseq_tutel did not write"),
        ({"pieces": [["../a.safetensors", "0", "00"]] * 4}, "fairseq_tutel did not write"),
        ({"dtype": "load"}, "fairseq_tutel did not write"),
        ({"shape": [5, 2]}, "fairseq_tutel did not write"),
        ({"slices": [0, 1]}, "fairseq_tutel did not write"),
        ({"slices": [3, 1], "pieces": [PIECE] * 12}, "fairseq_tutel did not write"),
        ({"pieces": [["a.safetensors"]]}, "fairseq_tutel did not write"),
    ],
)
def test_an_invalid_record_of_an_expert_tensor_raises_an_error(tmp_path, change, sentence):
    record = write(tmp_path, torch.randn(4, 2), Slice()).record()
    with pytest.raises(ValueError, match=sentence):
        bind({"a": {**record, **change}}, tmp_path / "checkpoint.pt")


def save(root: Path, name: str, content: str) -> str:
    """Save a sharded checkpoint as a training run does, and return the folder of the shard files."""
    folders.collect(root)
    folder = folders.begin(root)
    (folder / "a.safetensors").write_text(content)
    committed = folders.commit(folder, [content])
    torch.save({"model": {"a": {"expert_shards": 1, "folder": committed}}}, root / name)
    return committed


def held(root: Path) -> list[str]:
    return sorted(f"experts/{path.name}" for path in (root / "experts").iterdir())


def test_expert_folders_are_kept_while_a_checkpoint_names_them(tmp_path):
    first = save(tmp_path, "checkpoint1.pt", "one")
    second = save(tmp_path, "checkpoint2.pt", "two")
    assert (tmp_path / first / "a.safetensors").read_text() == "one"
    (tmp_path / "checkpoint1.pt").unlink()
    assert (tmp_path / first).is_dir()  # The old folder remains until the next save.
    third = save(tmp_path, "checkpoint_last.pt", "three")
    assert held(tmp_path) == sorted([second, third])


def age(folder: Path, seconds: float) -> None:
    """Set the age of a folder and of the files in the folder."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def forget(monkeypatch) -> None:
    """Clear this process's record of expert folders, so that they count as folders of another process."""
    monkeypatch.setattr(folders, "_known", set())


def test_a_recent_expert_folder_of_another_process_is_kept_for_an_hour(tmp_path, monkeypatch):
    theirs = folders.begin(tmp_path)
    (theirs / "a.safetensors").write_text("theirs")
    committed = tmp_path / folders.commit(theirs, ["theirs"])
    forget(monkeypatch)
    own = save(tmp_path, "checkpoint1.pt", "own")
    age(committed, folders.YOUNG_SECONDS - 60)
    folders.collect(tmp_path)
    assert held(tmp_path) == sorted([own, f"experts/{committed.name}"])
    age(committed, folders.YOUNG_SECONDS + 60)
    folders.collect(tmp_path)
    assert held(tmp_path) == [own]


def test_an_expert_folder_is_deleted_at_once_if_this_process_read_its_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, "checkpoint1.pt", "one")
    forget(monkeypatch)
    second = save(tmp_path, "checkpoint2.pt", "two")
    (tmp_path / "checkpoint1.pt").unlink()
    folders.collect(tmp_path)
    assert held(tmp_path) == [second]


def test_shard_files_with_equal_content_are_stored_once_and_replace_damaged_files(tmp_path):
    first = save(tmp_path, "checkpoint1.pt", "one")
    (tmp_path / first / "a.safetensors").write_text("damaged")
    assert save(tmp_path, "checkpoint_last.pt", "one") == first
    assert held(tmp_path) == [first]
    assert (tmp_path / first / "a.safetensors").read_text() == "one"


def test_an_old_incomplete_expert_folder_is_deleted(tmp_path):
    folder = folders.begin(tmp_path)
    of_a_tool = folders.begin(tmp_path, "convert")
    (folder / "half").write_text("half")
    os.utime(folder, (1, 1))
    folders.collect(tmp_path)
    assert folder.exists()  # The file `half` is recent.
    age(folder, folders.YOUNG_SECONDS)
    folders.collect(tmp_path)
    assert not folder.exists()
    assert of_a_tool.exists()
    assert folders.begin(tmp_path) != folder


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 90, b"PK", b"PK\x03\x04 and no more", b"PK\x05\x06" + b"\xff" * 80]
)
def test_no_expert_folder_is_deleted_if_a_checkpoint_cannot_be_read(tmp_path, caplog, content):
    first = save(tmp_path, "checkpoint1.pt", "one")
    (tmp_path / "old.pt").write_bytes(b"\x80\x02older than zip")
    (tmp_path / "checkpoint1.pt").write_bytes(content)
    folders.collect(tmp_path)
    assert held(tmp_path) == [first]
    assert "kept all folders" in caplog.text


def test_an_expert_folder_that_no_checkpoint_names_is_deleted(tmp_path):
    first = save(tmp_path, "checkpoint1.pt", "one")
    (tmp_path / "checkpoint1.pt").rename(tmp_path / "checkpoint1.pt.tmp")
    (tmp_path / "checkpoint_last.pt.tmp").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "old.pt").write_bytes(b"\x80\x02older than zip, which names " + first.encode())
    (tmp_path / "train.log").write_text(first)
    folders.collect(tmp_path)
    assert held(tmp_path) == []


def test_a_complete_expert_folder_is_flushed_to_disk(tmp_path, monkeypatch):
    folder, happened = folders.begin(tmp_path), []
    stock = os.rename
    monkeypatch.setattr(folders, "sync", lambda path: happened.append(("sync", path)))
    monkeypatch.setattr(os, "rename", lambda a, b: happened.append("rename") or stock(a, b))
    committed = tmp_path / folders.commit(folder, ["one"])
    assert happened == ["rename", ("sync", committed), ("sync", committed.parent)]


def test_a_shard_file_is_flushed_and_has_the_permissions_of_its_folder(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    for mode in (0o755, 0o750, 0o775):
        tmp_path.chmod(mode)
        path = tmp_path / f"{mode}.safetensors"
        write_file({"a": torch.ones(2)}, path)
        assert synced.pop() == path.stat().st_ino
        assert path.stat().st_mode & 0o777 == mode & 0o666


def test_cleanup_ignores_linked_folders_and_folders_with_other_names(tmp_path):
    (tmp_path / "experts" / "mine").mkdir(parents=True)
    folders.collect(tmp_path)
    assert (tmp_path / "experts" / "mine").is_dir()
    (tmp_path / "a").mkdir()
    there = save(tmp_path / "a", "checkpoint1.pt", "one")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "experts").symlink_to(tmp_path / "a" / "experts")
    folders.collect(tmp_path / "b")
    assert held(tmp_path / "a") == [there]


def test_a_sharded_checkpoint_can_be_loaded_through_a_link(tmp_path):
    whole = torch.randn(3, 4)
    torch.save({"a": write(tmp_path, whole, Slice()).record()}, tmp_path / "checkpoint.pt")
    link = tmp_path / "elsewhere" / "latest.pt"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "checkpoint.pt")
    state = torch.load(link, weights_only=True)
    bind(state, link)
    assert torch.equal(state["a"].whole(), whole)
