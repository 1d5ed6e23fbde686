"""Several languages and tasks in one model, as Z-code trains: the recipe through the stock commands."""

import shlex
import subprocess
import sys

import pytest
from cli import ROOT, USER_DIR, fairseq
from corpora import translation
from report_page import page_in, words_of
from tool_in_process import tool

from fairseq_tutel.tools.training_log import find_log

RECIPE = ROOT / "configs" / "args" / "zcode_small.args"
PAIRS = ("de-en", "xde-de")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """German and English, and each with noise as a language of its own."""
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


def test_experts_of_several_languages_and_tasks_are_reported_by_language(data, tmp_path):
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
    for pair in PAIRS:
        task = ("--task", "moe_translation_multi_simple_epoch", "--lang-pairs", pair)
        run = fairseq("validate", data, *opened, *task, "--log-format", "json")
        (save / f"{pair}.txt").write_text(run.output)

    log, files = find_log(save)
    assert {path.name for path in files} == {"train.log", *(f"{pair}.txt" for pair in PAIRS)}
    assert list(log.evaluations) == list(PAIRS)
    assert log.evaluations["de-en"].lists != log.evaluations["xde-de"].lists
    tool("report", save, "--output", tmp_path / "page.html")
    pictures = page_in(tmp_path / "page.html").pictures("data")
    assert [alt.split(":")[0] for alt, _ in pictures] == [
        f"several, {stack} layer 0" for stack in ("encoder", "decoder")
    ]
    for _, svg in pictures:
        for pair, record in log.evaluations.items():
            assert words_of(svg) >= {"expert", pair, f"ppl {record.values['ppl']:.2f}"}
