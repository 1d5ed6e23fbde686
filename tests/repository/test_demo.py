"""The demo prints progress of a dense and a MoE model."""

import importlib
import json
from pathlib import Path

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
