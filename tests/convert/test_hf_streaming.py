"""The import of many experts, interrupted: the same command continues and gives the same bytes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import nllb
import pytest
from tool_in_process import convert, refusal

from fairseq_tutel.checkpoint import atomic_save
from fairseq_tutel.convert.released import unfinished
from fairseq_tutel.convert.released.folder import ReleasedFolder

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("--expert-dtype", "int8")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return nllb.plain_folder(tmp_path_factory.mktemp("released") / "hf")


@pytest.fixture(scope="module")
def whole(released, tmp_path_factory):
    """The bytes of an import without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "ours"
    convert("from-hf", released, "--output", folder, *WORDS)
    return content(folder)


def content(folder):
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


class Reads:
    """Counts the expert tensors that are read, and interrupts the work at one of them."""

    def __init__(self, monkeypatch, stop=None, error=KeyboardInterrupt):
        self.names, plain = [], ReleasedFolder.read

        def read(folder, name):
            if ".experts." in name:
                self.names.append(name)
                if len(self.names) == stop:
                    raise error
            return plain(folder, name)

        monkeypatch.setattr(ReleasedFolder, "read", read)


@pytest.mark.parametrize("stop", [2, 30, 60])
def test_an_interrupted_import_continues_and_gives_the_same_bytes(
    stop, released, whole, tmp_path, monkeypatch
):
    command = ("from-hf", released, "--output", tmp_path / "ours", *WORDS)
    with monkeypatch.context() as patch:
        first = Reads(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            convert(*command)
    assert len(first.names) == stop and not (tmp_path / "ours").exists()
    with monkeypatch.context() as patch:
        second = Reads(patch)
        text = convert(*command)
    assert "continuing the work in" in text
    assert content(tmp_path / "ours") == whole
    assert os.listdir(tmp_path) == ["ours"]
    tensors = 4 * 4 * 4  # layers, experts, tensors of an expert
    # The tensor that was interrupted, and those of its step; the first one also gives the dtype.
    again = len(first.names) + len(second.names) - tensors - 2
    assert 0 <= again < 8 and (stop < 30 or len(second.names) < tensors)


def test_work_of_another_input_or_other_options_is_not_continued(released, whole, tmp_path, monkeypatch):
    command = ("from-hf", released, "--output", tmp_path / "ours")
    for more in ((), ("--expert-dtype", "int4")):
        with monkeypatch.context() as patch:
            Reads(patch, 30)
            with pytest.raises(KeyboardInterrupt):
                convert(*command, *more)
    file = next(released.glob("*.safetensors"))
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with monkeypatch.context() as patch:
        Reads(patch, 30)
        with pytest.raises(KeyboardInterrupt):
            convert(*command, *WORDS)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "the input or the options changed" in convert(*command, *WORDS)
    assert content(tmp_path / "ours") == whole


def test_a_kill_at_the_end_is_survived(released, whole, tmp_path, monkeypatch):
    """The experts have their final folder, but the checkpoint file is cut off."""
    command = ("from-hf", released, "--output", tmp_path / "ours", *WORDS)

    def cut_off(state, path, advance):
        Path(path).write_bytes(b"half")
        Path(path).rename(f"{path}.01234567.tmp")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic_save, "write", cut_off)
        with pytest.raises(KeyboardInterrupt):
            convert(*command)
    with (tmp_path / "ours.unfinished" / unfinished.JOURNAL).open("a") as file:
        file.write('["a cut off li')
    convert(*command)
    assert content(tmp_path / "ours") == whole


def test_a_full_disk_is_one_sentence_and_leaves_nothing_under_the_final_name(
    released, whole, tmp_path, monkeypatch
):
    command = ("from-hf", released, "--output", tmp_path / "ours", *WORDS)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for target, name in ((os, "posix_fallocate"), (atomic_save, "write")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, full)
            text = refusal(*command)
        assert "No space left on device" in text and "free disk space" in text
        assert not (tmp_path / "ours").exists()
        writing = tmp_path / "ours.unfinished" / "experts" / "writing"
        assert name == "write" or not [*writing.iterdir()]
    convert(*command)
    assert content(tmp_path / "ours") == whole


def test_a_corrupt_input_file_is_one_sentence(tmp_path):
    folder = nllb.plain_folder(tmp_path / "hf")
    file = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size // 2)
    text = refusal("from-hf", folder, "--output", tmp_path / "ours")
    assert f"{file} is corrupt" in text
    assert not (tmp_path / "ours").exists()


def test_a_value_that_is_not_finite_is_named(tmp_path):
    folder = nllb.plain_folder(tmp_path / "hf", files=1)
    (file,) = folder.glob("*.safetensors")
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    name = "model.decoder.layers.3.ffn.experts.expert_2.fc1.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file)
    text = refusal("from-hf", folder, "--output", tmp_path / "ours", *WORDS)
    assert f"--expert-dtype int8 cannot store {name}" in text


def test_an_unfinished_folder_is_used_by_one_process_and_is_not_a_user_s(released, tmp_path):
    command = ("from-hf", released, "--output", tmp_path / "ours")
    folder = tmp_path / "ours.unfinished"
    folder.mkdir()
    with unfinished._locked(folder):
        assert "another process writes to" in refusal(*command)
    (folder / "letters.txt").write_text("mine")
    assert "is the place of unfinished work" in refusal(*command)
    assert (folder / "letters.txt").read_text() == "mine"


def test_a_journal_with_other_results_is_one_sentence(released, tmp_path, monkeypatch):
    command = ("from-hf", released, "--output", tmp_path / "ours", *WORDS)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_save, "write", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(*command)
    journal = tmp_path / "ours.unfinished" / unfinished.JOURNAL
    key, first, *others = journal.read_text().splitlines()
    step, found = json.loads(first)
    for result in (3, {}, dict.fromkeys(found, 3), {name: ["00", "x", 0, 0] for name in found}):
        journal.write_text("\n".join([key, json.dumps([step, result]), *others, ""]))
        text = refusal(*command)
        assert "but its journal has other results (" in text and "; remove the folder" in text


def test_an_existing_output_is_replaced_only_if_asked(released, whole, tmp_path):
    command = ("from-hf", released, "--output", tmp_path / "ours", *WORDS)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "model.pt").write_text("older")
    assert "exists" in refusal(*command)
    convert(*command, "--overwrite")
    assert content(tmp_path / "ours") == whole


@pytest.mark.long
def test_a_killed_process_continues(tmp_path):
    released = nllb.plain_folder(
        tmp_path / "hf", d_model=64, encoder_ffn_dim=512, decoder_ffn_dim=512, num_experts=64
    )
    command = [
        sys.executable,
        "-m",
        "fairseq_tutel",
        "convert",
        "from-hf",
        "--input",
        released,
        *WORDS,
        "--output",
    ]
    subprocess.run([*command, tmp_path / "whole"], check=True, cwd=ROOT)
    journal = tmp_path / "ours.unfinished" / unfinished.JOURNAL
    process = subprocess.Popen([*command, tmp_path / "ours"], cwd=ROOT)
    while process.poll() is None and (not journal.exists() or len(journal.read_text().splitlines()) < 3):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "ours").exists()
    steps = len(journal.read_text().splitlines()) - 1
    text = subprocess.run(
        [*command, tmp_path / "ours"], check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert (
        "continuing the work" in text
        and f"\n{steps + 1} of 12: " in text
        and f"\n{steps} of 12: " not in text
    )
    assert content(tmp_path / "ours") == content(tmp_path / "whole")
