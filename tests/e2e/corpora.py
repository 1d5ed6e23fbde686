"""Text that a tiny model can learn, binarized by fairseq-preprocess."""

import numpy as np
from cli import fairseq


def language(folder):
    """Write and binarize a text of 40 words, each mostly followed by a few words; return its folder."""
    for split, lines in (("train", 220), ("valid", 24), ("test", 24)):
        write_text(folder / f"{split}.txt", lines, seed=len(split) + lines)
    prefixes = [f"--{s}pref={folder / (s + '.txt')}" for s in ("train", "valid", "test")]
    fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin", "--workers", 1)
    return folder / "bin"


def translation(folder):
    """Write and binarize a translation corpus: a target is the reversed source, with other words."""
    for split, lines in (("train", 160), ("valid", 21), ("test", 21)):
        write_text(folder / f"{split}.de", lines, seed=len(split) + lines, longest=9)
        source = (folder / f"{split}.de").read_text().splitlines()
        target = [" ".join(w.replace("w", "v") for w in line.split()[::-1]) for line in source]
        (folder / f"{split}.en").write_text("\n".join(target) + "\n")
    prefixes = [f"--{s}pref={folder / s}" for s in ("train", "valid", "test")]
    fairseq(
        "preprocess", "-s", "de", "-t", "en", *prefixes, "--destdir", folder / "bin",
        "--joined-dictionary", "--workers", 1,
    )  # fmt: skip
    return folder / "bin"


def write_text(path, lines, seed, longest=30):
    """Write a text file with sentences of 3 to `longest` words."""
    rng = np.random.default_rng(seed)
    text = []
    for _ in range(lines):
        word, words = int(rng.integers(40)), []
        for _ in range(int(rng.integers(3, longest))):
            words.append(f"w{word}")
            word = (3 * word + int(rng.integers(4))) % 40
        text.append(" ".join(words))
    path.write_text("\n".join(text) + "\n")
