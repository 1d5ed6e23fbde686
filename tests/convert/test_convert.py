"""The tests give the subcommands of `convert` hostile, damaged and sharded input, and a full disk."""

import os
import resource
from unittest import mock

import pytest
import torch
from moe_files import save
from safetensors.torch import save_file
from tool_in_process import convert, refusal, refusal_of, tool

from fairseq_tutel.checkpoint.files import is_whole
from fairseq_tutel.checkpoint.shards import ShardedTensor, write_pieces


class Hostile:
    """This object creates a folder if it is unpickled without restrictions."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


# Each entry has a `convert` tool, the name of an input file that contains code, and the tool's arguments.
READERS = {
    "meta": ("x-shared.pt", ("--input", "x")),
    "tutel": ("x0-of-1", ("--input-prefix", "x", "--input-size", 1)),
    "swin": ("x.pt", ("--input", "x.pt")),
    "prune": ("x.pt", ("--input", "x.pt", "--drop", 0)),
}


@pytest.mark.parametrize("older", [False, True], ids=["zip", "before zip"])
@pytest.mark.parametrize("kind", [*READERS, "inspect"])
def test_no_convert_tool_runs_code_from_an_input_file(kind, older, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, words = READERS.get(kind, ("x.pt", ("x.pt",)))
    state = {"model": {"decoder.version": torch.ones(1)}, "cfg": Hostile(tmp_path / "made")}
    torch.save(state, file, _use_new_zipfile_serialization=not older)
    tool_words = ("convert", kind, *words, "--output", "out") if kind in READERS else (kind, *words)
    message = refusal_of(*tool_words)
    assert file in message
    assert "which is corrupt or not a checkpoint" in message and "mkdir" in message
    assert [path.name for path in tmp_path.iterdir()] == [file]


WRITTEN = {"sharded": (), "full": (), "prune": ("--drop", 0)}


@pytest.fixture
def small_disk():
    """Limit files to 2000 bytes; a longer write raises the error "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def everything(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", WRITTEN)
def test_convert_prints_the_system_error_if_a_file_cannot_be_written(kind, tmp_path, request):
    save(tmp_path / "a.pt", hidden_dim=64)
    (tmp_path / "b.pt").write_text("older")
    before = everything(tmp_path)
    request.getfixturevalue("small_disk")
    words = ("--input", tmp_path / "a.pt", "--output", tmp_path / "b.pt", *WRITTEN[kind])
    words = (*words, "--overwrite")
    place = f"--output {tmp_path / 'b.pt'} could not be written (File too large); "
    assert refusal(kind, *words).startswith(place)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("where", ["fairseq_tutel.convert.sharded.digest", "torch.save"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_convert_sharded_leaves_no_new_file(where, error, tmp_path):
    """The interruption comes before or after the rename of the new expert folder."""
    save(tmp_path / "a.pt")
    for name in ("writing", "0123456789abcdef"):
        (tmp_path / "experts" / name).mkdir(parents=True)
        (tmp_path / "experts" / name / "half").write_text("of a training")
    (tmp_path / "other").mkdir()
    before = everything(tmp_path)
    for folder in (tmp_path, tmp_path / "other"):
        words = ("--input", tmp_path / "a.pt", "--output", folder / "b.pt")
        with mock.patch(where, side_effect=error), pytest.raises((SystemExit, KeyboardInterrupt)):
            convert("sharded", *words)
        assert everything(tmp_path) == before


def test_a_failed_convert_sharded_keeps_the_expert_folder_of_another_checkpoint(tmp_path):
    save(tmp_path / "a.pt")
    convert("sharded", "--input", tmp_path / "a.pt", "--output", tmp_path / "b.pt")
    before = everything(tmp_path)
    with mock.patch("torch.save", side_effect=OSError(28, "No space left on device")):
        words = ("--input", tmp_path / "a.pt", "--output", tmp_path / "c.pt")
        message = refusal("sharded", *words)
    assert message.endswith("(No space left on device); free disk space, or give another path.")
    assert everything(tmp_path) == before


FROM_OURS = {**WRITTEN, "dense": ("--experts", 0)}


@pytest.mark.parametrize("kind", FROM_OURS)
def test_convert_gives_equal_results_for_a_sharded_and_a_full_checkpoint(kind, tmp_path):
    """The written files and the printed texts are equal except for file names."""
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "whole.pt")
    shards = ("--input", tmp_path / "in" / "whole.pt", "--output", tmp_path / "in" / "shards.pt")
    convert("sharded", *shards)
    made = {}
    for name in ("whole", "shards"):
        (tmp_path / name).mkdir()
        words = ("--input", tmp_path / "in" / f"{name}.pt", "--output", tmp_path / name / "out.pt")
        printed = convert(kind, *words, *FROM_OURS[kind]).replace(f"/{name}/", "/")
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        assert files
        content = [
            path.read_bytes() if path.suffix == ".safetensors" else flat(torch.load(path)) for path in files
        ]
        made[name] = printed, [path.relative_to(tmp_path / name) for path in files], content
    assert made["whole"] == made["shards"]


def test_convert_tools_open_the_best_checkpoint_of_a_save_folder(tmp_path):
    save(tmp_path / "checkpoint_best.pt")
    printed = tool("inspect", tmp_path)
    assert printed == tool("inspect", tmp_path / "checkpoint_best.pt")
    (tmp_path / "out").mkdir()
    printed = convert("sharded", tmp_path, "--output", tmp_path / "out" / "a.pt")
    (folder,) = (tmp_path / "out" / "experts").iterdir()
    assert f"wrote {tmp_path / 'out' / 'a.pt'}" in printed and str(folder) in printed
    assert "a folder without" in refusal("full", tmp_path / "out", "--output", tmp_path / "b.pt")


ONE_BY_ONE = [("full",), ("sharded", "--expert-dtype", "int8"), ("prune", "--drop", "1")]


@pytest.mark.parametrize("words", ONE_BY_ONE, ids=str)
def test_convert_tools_hold_one_expert_of_a_sharded_checkpoint_in_memory(words, tmp_path):
    source, shards = save(tmp_path / "a.pt"), tmp_path / "b.pt"
    convert("sharded", "--input", source, "--output", shards)
    read, counts = ShardedTensor.read, []

    def counted(self, first, count, *others):
        counts.append(count)
        return read(self, first, count, *others)

    with mock.patch.object(ShardedTensor, "read", counted):
        convert(*words, "--input", shards, "--output", tmp_path / "c.pt")
    # `convert sharded` calls `read`, and other subcommands read each expert into a memory-mapped file.
    assert set(counts) == ({1} if words[0] == "sharded" else set())
    left = [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert is_whole(str(tmp_path / "c.pt")) and not left


def test_torch_loads_the_output_of_convert_full_without_classes_of_the_plugin(tmp_path):
    source, shards = save(tmp_path / "a.pt"), tmp_path / "b.pt"
    convert("sharded", "--input", source, "--output", shards)
    convert("full", "--input", shards, "--output", tmp_path / "c.pt")
    ours = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        found, expected = (torch.load(path, weights_only=True) for path in (tmp_path / "c.pt", source))
    finally:
        torch.serialization.add_safe_globals(ours)
    assert flat(found) == flat(expected)


def test_convert_full_without_disk_space_leaves_no_file(tmp_path):
    convert("sharded", "--input", save(tmp_path / "a.pt"), "--output", tmp_path / "b.pt")
    before, reserve, reserved = everything(tmp_path), os.posix_fallocate, []

    def full(*words):
        reserved.append(words)
        if len(reserved) > 1:
            raise OSError(28, "No space left on device")
        reserve(*words)

    with mock.patch("os.posix_fallocate", full):
        message = refusal("full", "--input", tmp_path / "b.pt", "--output", tmp_path / "c.pt")
    assert message == (
        f"--output {tmp_path / 'c.pt'} could not be written (No space left on device); free disk "
        "space, or give another path."
    )
    assert everything(tmp_path) == before


def test_converted_shard_files_equal_files_of_the_safetensors_library(tmp_path):
    values = {"10.b": torch.ones(3, dtype=torch.uint8), "2.b": torch.ones(2, 2), "1.b": torch.ones(1)}
    layout = {key: (value.dtype, tuple(value.shape)) for key, value in values.items()}
    for metadata in (None, {"format": "pt"}):
        write_pieces(layout, values.__getitem__, tmp_path / "ours", metadata)
        save_file(values, tmp_path / "theirs", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def flat(tree):
    """Replace tensors in nested dictionaries by lists, so that results can be compared."""
    if isinstance(tree, dict):
        return {key: flat(value) for key, value in tree.items()}
    return tree.tolist() if torch.is_tensor(tree) else tree


@pytest.mark.parametrize("kind", ["prune", "average"])
def test_no_convert_tool_replaces_a_file_without_overwrite(kind, tmp_path):
    path, written = save(tmp_path / "a.pt"), tmp_path / "b.pt"
    written.write_text("older")
    flag = "--inputs" if kind == "average" else "--input"
    words = (*FROM_OURS.get(kind, ()), flag, path, "--output", written)
    words = (*(() if kind == "average" else ("convert",)), kind, *words)
    before = everything(tmp_path)
    with pytest.raises(SystemExit, match=r"b.pt exists; give another name, or add --overwrite"):
        tool(*words)
    assert everything(tmp_path) == before
    tool(*words, "--overwrite")
    assert written.read_bytes() != b"older"


@pytest.mark.parametrize("kind", [*FROM_OURS, "upcycle", "average"])
def test_no_convert_tool_turns_a_damaged_file_into_a_valid_file(kind, tmp_path):
    path = save(tmp_path / "a.pt", layers=("decoder.layers.0",))
    weight = torch.load(path, weights_only=True)["model"]["decoder.embed_tokens.weight"]
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 3] ^= 1
    path.write_bytes(content)
    flag = "--inputs" if kind == "average" else "--input"
    words = (*FROM_OURS.get(kind, ()), flag, path, "--output", tmp_path / "b.pt")
    with pytest.raises(SystemExit, match=r"a\.pt, which is corrupt \(truncated .*\); .* another"):
        tool(*(() if kind == "average" else ("convert",)), kind, *words)
    assert list(tmp_path.iterdir()) == [path]
