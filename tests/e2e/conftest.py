"""Data and small model arguments that the end-to-end tests share."""

import os

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _logs(tmp_path_factory):
    os.environ["FAIRSEQ_TUTEL_TEST_LOGS"] = str(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def lm_data(tmp_path_factory):
    """A binarized language-model corpus: 40 words, every word prefers a few followers."""
    from cli import fairseq

    folder = tmp_path_factory.mktemp("lm")
    for split, lines in (("train", 220), ("valid", 24), ("test", 24)):
        _write_text(folder / f"{split}.txt", lines, seed=len(split) + lines)
    prefixes = [f"--{s}pref={folder / (s + '.txt')}" for s in ("train", "valid", "test")]
    fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin", "--workers", 1)
    return folder / "bin"


@pytest.fixture(scope="session")
def mt_data(tmp_path_factory):
    """A binarized translation corpus: the target is the source reversed, in other words."""
    from cli import fairseq

    folder = tmp_path_factory.mktemp("mt")
    for split, lines in (("train", 160), ("valid", 21), ("test", 21)):
        _write_text(folder / f"{split}.de", lines, seed=len(split) + lines, longest=9)
        source = (folder / f"{split}.de").read_text().splitlines()
        target = [" ".join(w.replace("w", "v") for w in line.split()[::-1]) for line in source]
        (folder / f"{split}.en").write_text("\n".join(target) + "\n")
    prefixes = [f"--{s}pref={folder / s}" for s in ("train", "valid", "test")]
    fairseq(
        "preprocess", "-s", "de", "-t", "en", *prefixes, "--destdir", folder / "bin",
        "--joined-dictionary", "--workers", 1,
    )  # fmt: skip
    return folder / "bin"


def _write_text(path, lines, seed, longest=30):
    rng = np.random.default_rng(seed)
    text = []
    for _ in range(lines):
        word, words = int(rng.integers(40)), []
        for _ in range(int(rng.integers(3, longest))):
            words.append(f"w{word}")
            word = (3 * word + int(rng.integers(4))) % 40
        text.append(" ".join(words))
    path.write_text("\n".join(text) + "\n")
