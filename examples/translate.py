"""Translate the first test sentences with a trained model, and print them beside the reference."""

import itertools
import sys
from pathlib import Path

import fairseq_tutel as ft

SHOWN = 3


def main() -> None:
    """The arguments are a --save-dir, a source file and its translation."""
    folder, *files = sys.argv[1:]
    model = ft.from_checkpoint(folder)
    texts = [Path(name).read_text(encoding="utf-8").splitlines() for name in files]
    for source, reference in itertools.islice(zip(*texts, strict=True), SHOWN):
        print(f"source:      {source}\ntranslation: {model.translate(source)}\nreference:   {reference}\n")
    print(f'In Python: import fairseq_tutel as ft; ft.from_checkpoint("{folder}").translate("…")')


if __name__ == "__main__":
    main()
