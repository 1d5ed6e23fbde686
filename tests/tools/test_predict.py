"""Tools write an output file completely or not at all."""

import errno

import pytest

from fairseq_tutel.tools.arguments import writing


def test_a_tool_keeps_the_old_output_file_if_writing_fails(tmp_path):
    path, link = tmp_path / "a.png", tmp_path / "link.png"
    link.symlink_to(path)
    for into in (path, link):
        with writing(into) as file:
            file.write_text(into.name)
            assert file.suffix == ".png"
    sentence = r"^--json is \S*a.png, which cannot be written: full\.$"
    with pytest.raises(ValueError, match=sentence), writing(path, "--json") as file:
        file.write_text("to")
        raise OSError(errno.ENOSPC, "full")
    assert path.read_text() == "link.png"
    assert sorted(tmp_path.iterdir()) == [path, link] and link.is_symlink()
