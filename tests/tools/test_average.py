"""`fairseq-tutel average`: the selected files, their mean, the output's content, and errors."""

import argparse

import pytest
import torch
from tool_in_process import convert, tool

from fairseq_tutel.checkpoint.average import average, mean
from fairseq_tutel.checkpoint.shards import ShardedTensor


def save(path, seed=0, **changes):
    """Write a fairseq checkpoint with experts; `changes` replace its top-level entries."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(5, 4, generator=generator)
    state = {
        "args": None,
        "cfg": {"model": argparse.Namespace(arch="moe"), "checkpoint": {}},
        "model": {
            "embed.weight": shared,
            "output.weight": shared,
            "output.first": shared[:2],
            "fc1.experts.fc1_weight": torch.randn(3, 6, 4, generator=generator),
            "norm.weight": torch.randn(4, generator=generator).half(),
            "version": torch.tensor([seed]),
        },
        "extra_state": {"epoch": seed},
        "last_optimizer_state": {"state": {0: torch.full((2,), float(seed))}},
        **changes,
    }
    torch.save(state, path)
    return path


def load(path):
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("copies", [1, 3, 10])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_the_mean_of_equal_tensors_has_the_same_bits(dtype, copies):
    tensor = (torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    found = mean([tensor] * copies)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_the_mean_is_rounded_once_and_integers_round_down():
    # In float32, 2^24 + 1 is rounded to 2^24. In float16, the sum would overflow.
    assert mean([torch.tensor([2.0**24]), torch.ones(1), torch.ones(1)]).item() == pytest.approx(
        (2**24 + 2) / 3, rel=1e-7
    )
    assert mean([torch.tensor([60000.0]).half()] * 3).item() == 60000
    assert mean([torch.tensor([3, -3, 255]), torch.tensor([4, -4, 255])]).tolist() == [3, -4, 255]


def test_everything_except_the_weights_is_copied_from_the_first_file(tmp_path):
    files = [save(tmp_path / f"{seed}.pt", seed) for seed in (4, 1, 2)]
    tool("average", *files, "--output", tmp_path / "mean.pt")
    found, states = load(tmp_path / "mean.pt"), [load(file) for file in files]
    for key, weight in found["model"].items():
        expected = sum(state["model"][key].double() for state in states) / 3
        if key == "version":
            expected = expected.floor()
        torch.testing.assert_close(weight.double(), expected, rtol=1e-3, atol=1e-5, msg=key)
        assert weight.dtype == states[0]["model"][key].dtype
    assert list(found["model"]) == list(states[0]["model"])
    assert found["extra_state"] == {"epoch": 4}
    assert found["last_optimizer_state"]["state"][0].tolist() == [4, 4]
    assert found["cfg"]["model"].arch == "moe"
    shared, tied = found["model"]["embed.weight"], found["model"]["output.weight"]
    assert shared.data_ptr() == tied.data_ptr()
    assert not (tmp_path / "mean.pt.tmp").exists()


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("is_wide", [False, True])
def test_moving_averages_replace_the_weights(tmp_path, kind, is_wide):
    ema = {key: value * 2 for key, value in load(save(tmp_path / "other.pt", 5))["model"].items()}
    extra = {"ema": ema}
    if is_wide:
        extra["ema_fp32_params"] = {key: value.float() / 3 for key, value in ema.items()}
    file = save(tmp_path / "a.pt", extra_state=extra)
    if kind == "sharded":
        convert("sharded", "--input", file, "--output", file := tmp_path / "sharded.pt")
    tool("average", file, "--ema", "--output", tmp_path / "ema.pt")
    found, expected = load(tmp_path / "ema.pt")["model"], extra["ema_fp32_params" if is_wide else "ema"]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value) and found[key].dtype == value.dtype, key


EPOCHS = [f"checkpoint{n}.pt" for n in (1, 2, 9, 10, 11)]
UPDATES = [f"checkpoint_{epoch}_{update}.pt" for epoch, update in ((1, 500), (1, 90), (2, 1000))]


@pytest.fixture(scope="module")
def save_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("save")
    for seed, name in enumerate([*EPOCHS, *UPDATES, "checkpoint_last.pt"]):
        save(folder / name, seed)
    return folder


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--num-epoch-checkpoints", 3), ["checkpoint11.pt", "checkpoint10.pt", "checkpoint9.pt"]),
        (
            ("--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 9),
            ["checkpoint9.pt", "checkpoint2.pt"],
        ),
        (("--num-update-checkpoints", 2), ["checkpoint_2_1000.pt", "checkpoint_1_500.pt"]),
        (
            ("--num-update-checkpoints", 2, "--checkpoint-upper-bound", 500),
            ["checkpoint_1_500.pt", "checkpoint_1_90.pt"],
        ),
    ],
)
def test_the_last_files_of_a_folder_are_averaged(save_dir, tmp_path, flags, expected):
    printed = tool("average", save_dir, "--output", tmp_path / "mean.pt", *flags)
    first, *taken, last = printed.splitlines()
    assert (first, last) == ("averaging", f"wrote {tmp_path / 'mean.pt'}")
    assert [line.strip() for line in taken] == [str(save_dir / name) for name in expected]
    whole = [load(save_dir / name)["model"]["fc1.experts.fc1_weight"] for name in expected]
    found = load(tmp_path / "mean.pt")["model"]["fc1.experts.fc1_weight"]
    torch.testing.assert_close(found, sum(whole) / len(whole))


REFUSED = {
    "missing": (("FOLDER/none.pt",), "INPUTS names FOLDER/none.pt, which does not exist; give"),
    "truncated": (("GOOD", "FOLDER/cut.pt"), "FOLDER/cut.pt, which is corrupt or not a checkpoint; remove"),
    "no model": (("FOLDER/tensor.pt",), "FOLDER/tensor.pt, which holds no model"),
    "fewer weights": (
        ("GOOD", "FOLDER/fewer.pt"),
        "the weight norm.weight is (4,) in GOOD and missing in FOLDER/fewer.pt; average checkpoints of one",
    ),
    "more experts": (
        ("GOOD", "FOLDER/wider.pt"),
        "fc1.experts.fc1_weight is (3, 6, 4) in GOOD and (8, 6, 4) in FOLDER/wider.pt",
    ),
    "a folder alone": (("FOLDER",), "INPUTS names FOLDER, which is a folder, pipe,"),
    "too few": (
        ("FOLDER", "--num-epoch-checkpoints", 3),
        "--num-epoch-checkpoints is 3, but INPUTS has only 0 files checkpointEPOCH.pt",
    ),
    "files for a folder": (
        ("GOOD", "--num-update-checkpoints", 1),
        "--num-update-checkpoints needs one folder, but INPUTS is GOOD",
    ),
    "bound without effect": (("GOOD", "--checkpoint-upper-bound", 3), "upper-bound has no effect"),
    "output is an input": (
        ("GOOD", "--output", "FOLDER/link.pt"),
        "--output is FOLDER/link.pt, which would overwrite the input GOOD; give another name",
    ),
    "no moving average": (
        ("GOOD", "--ema"),
        "INPUTS names GOOD, which has no moving average of --store-ema; give another checkpoint, or remove",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kinds", [("sharded", "sharded"), ("full", "sharded")])
def test_experts_in_shards_are_averaged_one_tensor_at_a_time(tmp_path, monkeypatch, kinds):
    files, state = [], {0: {"exp_avg": torch.ones(3, 6, 4)}}
    for seed, kind in enumerate(kinds):
        whole = save(tmp_path / f"whole{seed}.pt", seed, last_optimizer_state={"state": state})
        files.append(tmp_path / f"{kind}{seed}.pt")
        convert(kind, "--input", whole, "--output", files[-1])
    expected = average([tmp_path / f"whole{seed}.pt" for seed in range(2)]).state
    read, stock = [], ShardedTensor.read
    monkeypatch.setattr(ShardedTensor, "read", lambda *a: read.append(1) or stock(*a))
    found = average(files).state
    assert found["model"].keys() == expected["model"].keys()
    for key, weight in expected["model"].items():
        assert torch.equal(found["model"][key], weight), key
    # Shard files with optimizer state are read only for the first checkpoint.
    assert len(read) == kinds.count("sharded") + (kinds[0] == "sharded")
    assert torch.equal(found["last_optimizer_state"]["state"][0]["exp_avg"], torch.ones(3, 6, 4))


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_averaged_are_refused_in_one_sentence(tmp_path, case):
    good = save(tmp_path / "good.pt")
    (tmp_path / "link.pt").symlink_to(good)
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:2000])
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    model = load(good)["model"]
    save(tmp_path / "fewer.pt", model={k: v for k, v in model.items() if k != "norm.weight"})
    wider = {**model, "fc1.experts.fc1_weight": torch.ones(8, 6, 4)}
    save(tmp_path / "wider.pt", model=wider)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def filled(word):
        return str(word).replace("FOLDER", str(tmp_path)).replace("GOOD", str(good))

    words, sentence = REFUSED[case]
    with pytest.raises(SystemExit) as end:
        tool(
            "average",
            *map(filled, words),
            *(() if "--output" in words else ("--output", tmp_path / "mean.pt")),
        )
    message = end.value.code
    assert message.startswith("error: ")
    assert filled(sentence) in message
    assert "\n" not in message
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
