"""Hardware profiles: for the name of a GPU, from files, and from malformed files."""

import json
from dataclasses import asdict, replace

import pytest

from fairseq_tutel.parallel.machine import CPU, PRESETS, Machine, typical

A100 = PRESETS["a100"]


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", A100),
        ("NVIDIA GH200 480GB", PRESETS["h200"]),
        ("AMD Instinct MI250X", PRESETS["mi250"]),
        ("NVIDIA RTX A1000", replace(A100, name="A100, because NVIDIA RTX A1000 is unknown")),
        (None, CPU),
    ],
)
def test_a_gpu_is_identified_by_its_complete_model_number(gpu, expected):
    assert typical(gpu) == expected


def test_a_hardware_profile_is_read_back_from_its_file(tmp_path):
    for content in (asdict(A100), {"machine": asdict(A100), "plans": []}):
        (tmp_path / "machine.json").write_text(json.dumps(content))
        assert Machine.from_json(tmp_path / "machine.json") == A100


@pytest.mark.parametrize(
    "change",
    [
        {"intra": 3},
        {"inter": {"alpha_s": 0}},
    ],
)
def test_a_malformed_hardware_profile_raises_a_one_sentence_error(change, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(asdict(A100) | change))
    with pytest.raises(ValueError, match="cannot be read as a hardware profile") as error:
        Machine.from_json(path)
    assert "\n" not in str(error.value)
