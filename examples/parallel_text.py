"""Split parallel text files into train, valid and test, and words into pieces, for fairseq-preprocess.

Writes OUT/plain/{train,valid,test}.{de,en}, OUT/pieces/ with the same names, and OUT/bpe.model, which is
trained unless --sentencepiece-model is given.
"""

import argparse
import itertools
import random
from pathlib import Path

import sentencepiece

# Valid and test each have this part of all sentences, but at most this number.
HELD_OUT, MOST = 0.03, 500


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "target", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--vocab-size", type=int, default=2000, help="pieces of words, at most [2000]")
    parser.add_argument("--sentencepiece-model", type=Path, help="use this model instead of training one")
    arguments = parser.parse_args()
    files = (arguments.source, arguments.target)
    languages = [path.suffix[1:] for path in files]
    for path in files:
        if not path.is_file():
            raise SystemExit(f"error: {path} does not exist; give a text file.")
    sources, targets = map(lines, files)
    if len(sources) != len(targets):
        raise SystemExit(
            f"error: {files[0]} has {len(sources):,} lines, but {files[1]} has {len(targets):,}; give "
            "translations line by line."
        )
    pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source and target]
    if len(pairs) < 100:
        raise SystemExit(
            f"error: {arguments.source} and {arguments.target} have {len(pairs)} pairs of sentences; "
            "give at least 100."
        )
    random.Random(1).shuffle(pairs)
    held = min(MOST, int(HELD_OUT * len(pairs)) + 1)
    splits = {"valid": pairs[:held], "test": pairs[held : 2 * held], "train": pairs[2 * held :]}
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = arguments.sentencepiece_model or trained(arguments.out, splits["train"], arguments.vocab_size)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for kind, convert in (
        ("plain", str),
        ("pieces", lambda line: " ".join(pieces.encode(line, out_type=str))),
    ):
        folder = arguments.out / kind
        folder.mkdir(exist_ok=True)
        for split, chosen in splits.items():
            for column, language in enumerate(languages):
                text = "".join(f"{convert(pair[column])}\n" for pair in chosen)
                (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    counts = ", ".join(f"{len(splits[split]):,} {split}" for split in ("train", "valid", "test"))
    print(f"sentences: {counts}; {pieces.vocab_size():,} pieces of words in {model}")


def trained(folder: Path, pairs: list[tuple[str, str]], size: int) -> Path:
    """Train a sentencepiece model on pairs of sentences; return its file."""
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(pairs),
            model_prefix=str(folder / "bpe"),
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,  # a small text may have fewer pieces than the wanted number
            character_coverage=1.0,
            minloglevel=2,
        )
    except RuntimeError as error:
        if "Vocabulary size" not in str(error):
            raise
        raise SystemExit(
            f"error: --vocab-size is {size}, fewer than the text has characters; give a larger number."
        ) from error
    return folder / "bpe.model"


def lines(path: Path) -> list[str]:
    """Return the lines of a text file, without spaces at the ends."""
    # This does not use read_text, which also splits lines at carriage returns.
    return [line.strip() for line in path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")]


if __name__ == "__main__":
    main()
