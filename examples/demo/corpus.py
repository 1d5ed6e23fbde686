"""A language-modelling corpus from the sources of Python's own standard library.

Every Python installation has these files. They contain English text and code, and need no download.
"""

import os
import random
import sysconfig
import tokenize
from pathlib import Path

import sentencepiece

VOCAB_SIZE = 4000

# Filled in this order, file by file, so that no file is in two splits.
SPLIT_CHARS = {"test": 250_000, "valid": 100_000, "train": 5_600_000}

# Skipped folders: data, unusual code, or packages that are not part of the standard library.
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}


def build(folder: Path) -> None:
    """Write `train.bpe`, `valid.bpe`, `test.bpe` and the tokenizer's `bpe.model` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _source_files()
    for split, wanted_chars in SPLIT_CHARS.items():
        with open(folder / f"{split}.txt", "w", encoding="utf-8") as text:
            while files and text.tell() < wanted_chars:
                text.writelines(_lines(files.pop()))

    model = folder / "bpe.model"
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "train.txt"),
        model_prefix=str(model.with_suffix("")),
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        # The tokenizer keeps white space, because indentation matters. A piece may be a complete indent.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=1.0,
        minloglevel=1,
    )

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for split in SPLIT_CHARS:
        with open(folder / f"{split}.txt", encoding="utf-8") as text:
            encoded = tokenizer.encode([line.rstrip("\n") for line in text], out_type=str)
        with open(folder / f"{split}.bpe", "w", encoding="utf-8") as text:
            text.writelines(" ".join(pieces) + "\n" for pieces in encoded)
        tokens = sum(len(pieces) + 1 for pieces in encoded)
        print(f"  {split}: {len(encoded):,} lines, {tokens:,} tokens", flush=True)


def _source_files() -> list[Path]:
    """Return all source files of the corpus in a fixed pseudorandom order."""
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")
        )
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    random.Random(1).shuffle(files)
    return files


def _lines(path: Path) -> list[str]:
    """Return the lines of a source file that are not blank."""
    with tokenize.open(path) as source:
        return [line.rstrip() + "\n" for line in source if line.strip()]
