"""Hardware profiles: of a GPU by its name, in files, and malformed files."""

import json
from dataclasses import replace

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
def test_a_gpu_is_known_by_its_whole_number_or_said_not_to_be(gpu, expected):
    assert typical(gpu) == expected


def test_a_machine_survives_its_file(tmp_path):
    for machine in PRESETS.values():
        machine.to_json(tmp_path / "machine.json")
        assert Machine.from_json(tmp_path / "machine.json") == machine


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"flops_per_s": 0}, "has flops_per_s = 0; give a number above 0"),
        ({"memory_bytes": "80G"}, "has memory_bytes = '80G'; give a number above 0"),
        ({"intra": 3}, "is not a hardware profile (TypeError("),
        ({"inter": {"alpha_s": -1, "bytes_per_s": 1}}, "has inter.alpha_s = -1; give seconds, 0 or more"),
        ({"inter": {"alpha_s": 0, "bytes_per_s": 0}}, "has inter.bytes_per_s = 0; give a number"),
        ({"launch_s": -1e-6}, "has launch_s = -1e-06; give seconds, 0 or more"),
        ({"launch_s": False}, "has launch_s = False; give seconds, 0 or more"),
        ({"inter_shared": 1}, "has inter_shared = 1; give true or false"),
        (
            {"speed": 1},
            'is not a hardware profile (TypeError("Machine.__init__() got an unexpected keyword',
        ),
    ],
)
def test_a_bad_machine_is_refused_in_one_sentence(change, sentence, tmp_path):
    path = tmp_path / "machine.json"
    A100.to_json(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError) as error:
        Machine.from_json(path)
    assert str(error.value).startswith(f"{path} {sentence}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": '])
def test_what_is_no_machine_is_refused(text, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="give a file that `tune --json` wrote"):
        Machine.from_json(path)
