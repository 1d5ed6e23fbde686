"""examples/quantized_quality.py: its table, and a run of it on a tiny corpus."""

import importlib
import sys

import pytest
from cli import ROOT


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("quantized_quality")


def seed(example, perplexity, error):
    found = {f"{name}, errors": [] if name == "fp32" else [error, 2 * error] for name in example.BITS}
    for i, (experts, others) in enumerate(example.CASES):
        found[f"{experts}, {others}, perplexity"] = perplexity * (1 + i / 100)
        found[f"{experts}, {others}, BLEU"] = perplexity / 2 - i
    return found


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_means_over_seeds_and_the_range_of_errors(example):
    lines = example.table([seed(example, 20, 0.01), seed(example, 30, 0.02)]).splitlines()
    assert len(lines) == 2 + len(example.CASES) == 10
    assert cells(lines[2])[:4] == ["fp32", "fp32", "32", ""]
    assert cells(lines[2])[4:] == ["25.00 ± 7.07", "0.00 ± 0.00", "12.50 ± 3.54", "0.00 ± 0.00"]
    assert cells(lines[5])[:4] == ["int4", "fp32", "4.25", "1.0 to 4.0 %"]
    assert cells(lines[5])[4:] == ["25.75 ± 7.28", "3.00 ± 0.00", "9.50 ± 3.54", "-3.00 ± 0.00"]
    assert cells(lines[-1])[:2] == ["int4", "int8"]
    lines = example.table([seed(example, 20, 0.00001)]).splitlines()
    assert cells(lines[3]) == ["bf16", "fp32", "16", "0.0 %", "20.20", "1.00", "9.00", "-1.00"]


@pytest.mark.long
def test_the_example_trains_quantizes_and_measures(example, mt_data, tmp_path, monkeypatch, capsys):
    model = importlib.import_module("translation_model")
    monkeypatch.setattr(model, "FLAGS", model.FLAGS.replace("--max-update 300", "--max-update 40"))
    monkeypatch.setattr(example, "CASES", (("fp32", "fp32"), ("int4", "int8")))
    monkeypatch.setattr(sys, "argv", ["quantized_quality.py", str(mt_data), str(tmp_path)])
    monkeypatch.setenv("SEEDS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    example.main()
    *_, base, quantized = map(cells, capsys.readouterr().out.splitlines())
    assert (base[:4], quantized[:3]) == (["fp32", "fp32", "32", ""], ["int4", "int8", "4.25"])
    errors = [float(word) for word in quantized[3].split() if word not in ("to", "%")]
    assert all(6 < error < 12 for error in errors)
    assert float(quantized[4]) == pytest.approx(float(base[4]), rel=0.02)
    monkeypatch.setattr(example, "train", lambda data, folder, seed: folder / "unused.pt")
    example.main()  # all results exist
    assert [*map(cells, capsys.readouterr().out.splitlines())][-1] == quantized
