"""`convert safetensors` and back: equal weights in files that the library reads, written whole."""

import argparse
import json
import os
import resource
import shutil

import pytest
import torch
from moe_files import load, save
from safetensors import safe_open
from tool_in_process import convert, refusal

INDEX = "model.safetensors.index.json"


def change(model):
    table = torch.randn(7, 8)
    model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]
    model["decoder.rows"], model["decoder.column"] = table[2:4], table[:, 1]
    model["decoder.half"] = torch.randn(3).to(torch.bfloat16)
    model["decoder.scalar"], model["decoder.nothing"] = torch.tensor(5), torch.ones(0, 3)


@pytest.fixture
def folder(tmp_path):
    """A folder of safetensors of the checkpoint a.pt."""
    save(tmp_path / "a.pt", change=change)
    printed = convert(*there(tmp_path), "--max-shard-size", "1KiB")
    assert printed == f"wrote {tmp_path / 'f'}: 6 files of weights\n"
    return tmp_path / "f"


def there(path, name="a.pt"):
    return ("safetensors", "--input", path / name, "--output", path / "f")


def back(path):
    return ("from-safetensors", "--input", path / "f", "--output", path / "b.pt")


def same(a, b):
    assert a["model"].keys() == b["model"].keys()
    for key, tensor in a["model"].items():
        assert tensor.dtype == b["model"][key].dtype and torch.equal(tensor, b["model"][key]), key
    for key in ("args", "cfg", "optimizer_history"):
        assert a[key] == b[key]


def test_weights_and_options_come_back_bit_for_bit(folder, tmp_path):
    convert(*back(tmp_path))
    a, b = load(tmp_path / "a.pt"), load(tmp_path / "b.pt")
    same(a, b)
    names = ("decoder.output_projection.weight", "decoder.embed_tokens.weight")
    assert len({b["model"][name].data_ptr() for name in names}) == 1
    assert "last_optimizer_state" not in b and b["extra_state"]["train_iterator"]["epoch"] == 1


def test_files_are_those_that_other_programs_read(folder, tmp_path):
    index, model, total = json.loads((folder / INDEX).read_text()), {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            keys = list(file.keys())
            assert {index["weight_map"][key] for key in keys} == {path.name}
            found = {key: file.get_tensor(key) for key in keys}
        size = sum(tensor.nbytes for tensor in found.values())
        assert size <= 1024 or len(found) == 1
        total, model = total + size, model | found
    assert path.name == "model-00006-of-00006.safetensors"
    assert index["metadata"] == {"total_size": total}
    expected = load(tmp_path / "a.pt")["model"]
    assert expected.keys() - model.keys() == {"decoder.output_projection.weight"}
    assert model.keys() == index["weight_map"].keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.items())


def test_experts_in_shards_and_an_older_file_make_the_same(folder, tmp_path):
    convert("sharded", "--input", tmp_path / "a.pt", "--output", tmp_path / "s.pt")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    convert(*there(tmp_path, "s.pt"), "--overwrite", "--max-shard-size", "1KiB")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    state = load(tmp_path / "a.pt")
    options = argparse.Namespace(arch="moe_transformer_lm", lr=[0.1], of=argparse.Namespace(a=None))
    torch.save({**state, "args": options, "cfg": None}, tmp_path / "old.pt")
    convert(*there(tmp_path, "old.pt"), "--overwrite")
    convert(*back(tmp_path))
    same(torch.load(tmp_path / "old.pt", weights_only=False),
         torch.load(tmp_path / "b.pt", weights_only=False))  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.pt", "b.pt", "experts", "f", "old.pt", "s.pt"]  # fmt: skip


def test_a_folder_is_written_whole_or_not_at_all(folder, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert refusal(*there(tmp_path)).endswith("f exists; give another path, or add --overwrite.")
    shutil.copy(tmp_path / "a.pt", folder)
    message = refusal(*there(tmp_path, "f/a.pt"), "--overwrite")
    assert message.endswith("f, which holds the input; give a new path.")
    (folder / "a.pt").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        message = refusal(*there(tmp_path), "--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.endswith(
        "f could not be written (File too large); free disk space, or give another path."
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def edit(name, change):
    def apply(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def cut(folder):
    path = folder / "model-00002-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


FIT = "are inconsistent or of another version"
DAMAGED = {
    "cut": (cut, "model-00002-of-00006.safetensors is missing or corrupt"),
    "a file is gone": (lambda f: (f / "model-00001-of-00006.safetensors").unlink(), "missing or"),
    "no options": (lambda f: (f / "options.json").unlink(), "which has no options.json"),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), "cannot be read as JSON"),
    "too deep": (lambda f: (f / INDEX).write_text("[" * 10**6), "cannot be read as JSON"),
    "a pipe": (lambda f: ((f / INDEX).unlink(), os.mkfifo(f / INDEX)), "which has no"),
    "a list": (lambda f: (f / "options.json").write_text("[]"), FIT),
    "newer": (edit("options.json", lambda c: c.update(fairseq_tutel=2)), FIT),
    "elsewhere": (
        edit(INDEX, lambda c: c["weight_map"].update(x="../model-00001-of-00006.safetensors")), FIT,
    ),
    "elsewhere, after a right name": (
        edit(INDEX, lambda c: c["weight_map"].update(x="model-00001-of-00006.safetensors/../../x")),
        FIT,
    ),
    "another weight": (
        edit(INDEX, lambda c: c["weight_map"].update(x="model-00001-of-00006.safetensors")),
        "its weights differ from the index",
    ),
    "tied to nothing": (edit("options.json", lambda c: c["tied"].update(x="y")), FIT),
    "a text for options": (edit("options.json", lambda c: c.update(cfg="x")), FIT),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_no_such_folder_is_refused(case, folder, tmp_path):
    damage, sentence = DAMAGED[case]
    damage(folder)
    assert sentence in refusal(*back(tmp_path))
    assert not (tmp_path / "b.pt").exists()


def test_what_cannot_be_written_so_is_refused(tmp_path):
    path = save(tmp_path / "a.pt")
    for size in ("5", "0GB", "many", "9" * 400 + "GB"):
        message = refusal(*there(tmp_path), "--max-shard-size", size)
        assert message.startswith(f"--max-shard-size is {size}; give a size with a unit (KB")
    (tmp_path / "f").mkdir()
    assert "has no model.safetensors.index.json" in refusal(*there(tmp_path), "--overwrite")
    (tmp_path / "f").rmdir()
    state = load(path)
    torch.save({**state, "task_state": {"seen": torch.ones(1)}}, path)
    assert "options that JSON cannot represent (a Tensor); give" in refusal(*there(tmp_path))
    torch.save({**state, "model": {"x": 1}}, path)
    assert "has a int in x, but safetensors files hold only tensors" in refusal(*there(tmp_path))
    assert list(tmp_path.iterdir()) == [path]
