"""Trains the recipe zcode_small, one model for several languages and tasks."""

import re
import shlex
import subprocess
import sys

import pytest
from cli import ROOT, USER_DIR, fairseq
from corpora import translation

RECIPE = ROOT / "configs" / "args" / "zcode_small.args"
PAIRS = ("de-en", "xde-de")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus of two languages; noised text of each language is an additional language."""
    folder = tmp_path_factory.mktemp("zcode")
    data = translation(folder)
    known = ("--srcdict", data / "dict.de.txt", "--tgtdict", data / "dict.de.txt", "--workers", 1)
    prefixes = [f"--{s}pref={folder / s}" for s in ("train", "valid")]
    for language in ("de", "en"):
        for split in ("train", "valid"):
            text, noised = (folder / f"{split}.{name}" for name in (language, f"x{language}"))
            with open(text) as source, open(noised, "w") as target:
                command = [sys.executable, ROOT / "examples" / "noise.py"]
                subprocess.run(command, stdin=source, stdout=target, check=True, timeout=60)
            assert text.read_text() != noised.read_text()
        words = ("-s", f"x{language}", "-t", language, *prefixes, "--destdir", data, *known)
        fairseq("preprocess", *words)
    return data


def test_validation_logs_separate_expert_loads_for_each_language_pair(data, tmp_path):
    save = tmp_path / "several"
    save.mkdir()
    words = shlex.split(RECIPE.read_text())
    words[words.index("--user-dir") + 1] = USER_DIR
    less = (
        "--max-update", 3, "--max-tokens", 200, "--log-interval", 1, "--encoder-layers", 1,
        "--decoder-layers", 1, "--required-batch-size-multiple", 1, "--cpu",
    )  # fmt: skip
    fairseq("train", data, *words, *less, "--save-dir", save, "--log-file", save / "train.log")
    opened = ("--user-dir", USER_DIR, "--path", save / "checkpoint_last.pt", "--max-tokens", 200)
    loads = []
    for pair in PAIRS:
        task = ("--task", "moe_translation_multi_simple_epoch", "--lang-pairs", pair)
        run = fairseq("validate", data, *opened, *task, "--log-format", "json")
        loads.append(re.findall(r'moe_load_\w+": \[.+?\]', run.output))
    assert len(loads[0]) == len(loads[1]) > 1 and loads[0] != loads[1]
