"""Runs the commands and Python blocks of README.md and docs/ with small sizes, in one folder per page."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import nllb
import numpy as np
import pytest
import released_models
from cli import ROOT, fairseq, tail
from models import lm_args, mt_args
from page_settings import (
    EDITS,
    FILES,
    HYDRA_SMALL,
    KEPT,
    LM_FLAGS,
    LM_SIZES,
    MOE_FLAGS,
    MT_FLAGS,
    MT_SIZES,
    NOT_RUN,
    PROGRAMS,
    PYTHON,
    RANKS,
    SMALL,
    STOCK,
    TRAIN,
    TWO_UPDATES,
    UPDATES,
)
from pages import PAGES, blocks, commands
from tool_in_process import tool


def reasons(page: str) -> dict[str, str]:
    return NOT_RUN.get(page, {})


def edited(page: str, text: str) -> str:
    for old, new in EDITS.get(page, []):
        text = text.replace(old, new)
    return text


def runs(page: str) -> list[tuple[int, str]]:
    """Return the line number and the text of every command of a page that is not in NOT_RUN."""
    skipped = tuple(reasons(page))
    found = [(line, text) for line, text in commands(page) if not text.startswith(skipped or ("\0",))]
    return [(line, edited(page, text)) for line, text in found]


def completed(words: list[str], folder: Path) -> list[str]:
    """Add small model sizes to the arguments of a training command, and fill in the placeholders."""
    if words[0] == "…":
        words = ["TRAIN", *words[1:]]
    if "TRAIN" in words:
        at = words.index("TRAIN")
        words = [*words[:at], *TRAIN.split(), *words[at + 1 :]]
    is_lm = any("_lm" in word or "language_modeling" in word for word in words)
    flags = LM_FLAGS if is_lm else MT_FLAGS
    if "moe_" in " ".join([*words, flags["--arch"] if "--arch" not in words else ""]):
        flags = {**flags, **MOE_FLAGS}
    if "…" in words:
        at = words.index("…")
        save_dir = next(name for i in count() if not (folder / (name := f"run{i}")).exists())
        flags = {**flags, "--save-dir": save_dir}
        given = [word for flag in flags if flag not in words for word in (flag, flags[flag])]
        words = [*words[:at], *given, *(word for word in words[at:] if word != "…")]
    sized = []
    for before, word in zip(["", *words], words, strict=False):
        sized.append(flags["--arch"] if word == "moe_…" else word)
        if before.endswith("arch") and "transformer" in sized[-1] and "--encoder-layers" not in words:
            sized += (LM_SIZES if is_lm else MT_SIZES).split()
    return sized


def run(page: str, command: str, folder: Path) -> None:
    """Run a page's command; a failure raises SystemExit, CalledProcessError or AssertionError."""
    command = command.replace("--nproc_per_node 8", "--nproc_per_node 2").replace("$PWD", str(folder))
    *before, command = command.split(" && ")
    for other in before:
        subprocess.run(["bash", "-c", other], cwd=folder, check=True, timeout=60)
    command, *target = re.split(r" > (?=\S+ 2>&1$)", command)
    words = shlex.split(command, comments=True)
    env = {"PWD": str(folder)}
    while "=" in words[0]:
        name, _, env[name] = words.pop(0).partition("=")
    small = [*SMALL, *UPDATES.get(page, TWO_UPDATES)]
    match words:
        case ["fairseq-hydra-train", *rest]:
            done = fairseq("hydra-train", *rest, *HYDRA_SMALL, env=env)
        case ["fairseq-train", *rest]:
            done = fairseq("train", *completed(rest, folder), *small, env=env)
        case ["torchrun", "--nproc_per_node", ranks, *_] if RANKS & {*words}:
            program, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
            if program == "fairseq_tutel.train":
                rest = [*completed(rest, folder), *small]
            name, stdin = program.replace("fairseq_", "").replace(".", "-"), folder / "stdin.txt"
            done = fairseq(name, *rest, ranks=int(ranks), env=env, stdin=stdin)
        case ["fairseq-tutel", *rest]:
            tool(*rest)
            return
        case [str() as name, *rest] if name.startswith("fairseq-"):
            done = fairseq(name.removeprefix("fairseq-"), *rest, env=env)
        case _:
            start = ["bash", "-c", f"set -o pipefail; {command}"]
            subprocess.run(start, cwd=folder, check=True, timeout=300, env=_environment())
            return
    if target:
        (folder / target[0].split()[0]).write_text(done.output)


def _environment() -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    path = f"{bin_folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the commands of a page run, with links to files of the repository."""
    for name in ("user_dir", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "stdin.txt").write_text("w1 w2\nw3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRSEQ_TUTEL_TEST_LOGS", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def shelf(lm_data, mt_data, tmp_path_factory):
    """The folder with the data and checkpoints that the commands of the pages use."""
    shelf = tmp_path_factory.mktemp("shelf")
    (shelf / "nothing").mkdir()
    shutil.copytree(mt_data, shelf / "pairs")
    shutil.copytree(mt_data, shelf / "DATA_BIN")
    shutil.copytree(lm_data, shelf / "DATA_BIN", dirs_exist_ok=True)
    shutil.copy(mt_data.parent / "test.en", shelf)
    words = mt_args(mt_data, shelf / "mt", "--moe-pregate", 1, *KEPT.split(), updates=90)
    words.remove("--no-epoch-checkpoints")
    (shelf / "mt").mkdir()
    fairseq("train", *words, "--log-file", shelf / "mt" / "train.log")
    fairseq("train", *mt_args(mt_data, shelf / "teacher", "--decoder-layers", 6, updates=2))
    several = ("--task", "moe_translation_multi_simple_epoch", "--lang-pairs", "de-en")
    (shelf / "several").mkdir()
    log = ("--log-file", shelf / "several" / "train.log")
    fairseq("train", *mt_args(mt_data, shelf / "several", *several, *log, updates=2))
    fairseq("train", *lm_args(lm_data, shelf / "lm", "--tokens-per-sample", 512, updates=2))
    fairseq("train", *mt_args(mt_data, shelf / "plain", updates=2))
    dense = mt_args(
        mt_data, shelf / "dense", "--arch", "transformer_iwslt_de_en", *STOCK.split(), updates=2
    )
    at = dense.index("--moe-freq")
    fairseq("train", *dense[:at], *dense[at + 4 :])
    best = shelf / "mt" / "checkpoint_best.pt"
    (shelf / "sharded").mkdir()
    tool("convert", "sharded", "--input", best, "--output", shelf / "sharded" / "sharded.pt")
    _train_pieces(mt_data.parent / "train.de", shelf / "bpe")
    _draw_images(shelf / "vision" / "mnist_5k")
    _save_released(shelf)
    return shelf


def _train_pieces(text: Path, prefix: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    options = {"vocab_size": 20, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(prefix), **options)


def _save_released(shelf: Path) -> None:
    """Save small random models in Hugging Face's format, and convert some of them to fairseq's format."""
    pytest.importorskip("transformers")
    for name in ("nllb", "roberta"):
        released_models.saved(name, shelf / "released" / name)
        tool("convert", "from-hf", shelf / "released" / name, "--output", shelf / f"ours-{name}")
    nllb.save(nllb.moe_model(), shelf / "released" / "moe")
    (shelf / "experts.json").write_text('{"eng_Latn": [0, 1, 4, 5], "fra_Latn": [8, 9, 12, 13]}')


def _draw_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for split in ("train", "valid", "test"):
        images = rng.integers(256, size=(20, 28, 28), dtype=np.uint8)
        np.savez(folder / f"{split}.npz", images=images, labels=np.arange(20) % 10)


def lay_out(page: str, shelf: Path, folder: Path) -> None:
    """Copy data and checkpoints to the file names that the commands of a page use."""
    named = {"DATA_BIN": "DATA_BIN", "DATA": "DATA_BIN", **FILES.get(page, {})}
    for name, sources in named.items():
        for source in sources.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (shelf / source).is_dir():
                shutil.copytree(shelf / source, folder / name, dirs_exist_ok=True)
            else:
                shutil.copy(shelf / source, folder / name)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_run_or_has_a_reason_in_not_run(page):
    texts = [text for _, text in commands(page)]
    for start in reasons(page):
        assert any(text.startswith(start) for text in texts), f"{page} has no command {start}"
    for _, text in runs(page):
        words = [word for word in text.split(" && ")[-1].split() if "=" not in word]
        assert words[0] in PROGRAMS, f"{page}: run {text!r} in this test, or add it to NOT_RUN"


def check(page: str, folder: Path) -> None:
    """Run all commands of a page, and then all Python blocks of the page as one program."""
    failed = []
    for line, command in runs(page):
        try:
            run(page, command, folder)
        except (AssertionError, SystemExit, subprocess.CalledProcessError) as error:
            failed.append(f"{page}:{line}: {command}\n{tail(str(error), 12)}")
    start, edits = PYTHON.get(page, (["python"], []))
    text = edited(page, "\n".join(block.text for block in blocks(page, "python")))
    for old, new in edits:
        text = text.replace(old, new)
    (folder / "page.py").write_text(text)
    done = subprocess.run(
        [*start, "page.py"], cwd=folder, capture_output=True, text=True, timeout=300, env=_environment()
    )
    if done.returncode:
        failed.append(f"{page}: Python\n{tail(done.stderr)}")
    assert not failed, "\n\n".join(failed)


def test_the_commands_of_the_readme_need_only_two_text_files(mt_data, folder):
    for language in ("de", "en"):
        shutil.copy(mt_data.parent / f"train.{language}", folder / f"my.{language}")
    check("README.md", folder)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES[1:] if runs(page) or blocks(page, "python")])
def test_the_commands_and_python_blocks_of_a_documentation_page_run(page, shelf, folder):
    lay_out(page, shelf, folder)
    check(page, folder)
