"""Reading a pipe, a folder, a device, a deeply nested file or a large file raises an error.

Tools must not send control characters of a file to the terminal.
"""

import json
import os
import socket

import pytest
import torch
from moe_files import save
from tool_in_process import refusal_of, tool

from fairseq_tutel.files import content_of, error_line, json_of, printable
from fairseq_tutel.plans.format import to_json
from fairseq_tutel.plans.generators import make


def test_a_deeply_nested_json_file_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nests too deeply"):
        json_of(path)


def test_special_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path, "/dev/zero", tmp_path / "socket"):
            with pytest.raises(OSError):
                content_of(path)


def test_the_error_for_a_folder_names_the_folder(tmp_path):
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        content_of(tmp_path)


def test_a_large_file_is_refused(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert content_of(path, largest=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        content_of(path, largest=4)


def test_control_characters_are_printed_as_escapes():
    assert printable("a\x1b[31m\x9b\r\u202eb\n\tä") == "a\\x1b[31m\\x9b\\r\\u202eb\n\tä"
    assert error_line(ValueError("a\x1b\nb")) == "error: a\\x1b\\nb"


def test_control_characters_of_a_checkpoint_do_not_reach_the_terminal(tmp_path):
    """The control characters are in the names of a tensor and of the file, and in an option's value."""

    def rename(model):
        model["decoder.\x1b[2J"] = torch.ones(2)

    path = save(tmp_path / "a\x1b[2J.pt", change=rename)
    state = torch.load(path, weights_only=True)
    state["cfg"]["task"]["_name"] = "moe_\x9b2J"
    torch.save(state, path)
    said = tool("inspect", path)
    assert "\\x1b[2J" in said and "moe_\\x9b2J" in said
    assert "\\x1b[2J" in refusal_of("inspect", tmp_path / "b\x1b[2J.pt")
    assert not {"\x1b", "\x9b"} & set(said + tool("inspect", path, "--json"))


def test_control_characters_of_a_plan_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "plan.json"
    plan = {**to_json(make("ring", "all_gather", 2)), "name": "ring \x1b[2J"}
    path.write_text(json.dumps(plan))
    said = tool("plan-check", path)
    assert said.startswith("ring \\x1b[2J: all_gather of 2 ranks") and "\x1b" not in said
    plan["collective"] = "\x1b[2J"
    path.write_text(json.dumps(plan))
    assert "\x1b" not in refusal_of("plan-check", path)
