"""Translate the first test sentences with a trained model, and print each output with its reference."""

import itertools
import sys
from pathlib import Path

import fairseq_tutel as ft

SHOWN = 3


def main() -> None:
    """The arguments are a --save-dir, a source file and its translation.

    With --multilingual, the suffixes of the files are the codes of the languages.
    """
    folder, *files = (word for word in sys.argv[1:] if word != "--multilingual")
    options = {}
    if "--multilingual" in sys.argv:
        codes = [name.rpartition(".")[2] for name in files]
        options = dict(zip(("source_lang", "target_lang"), codes, strict=True))
    model = ft.from_checkpoint(folder)
    texts = [Path(name).read_text(encoding="utf-8").splitlines() for name in files]
    for source, reference in itertools.islice(zip(*texts, strict=True), SHOWN):
        translation = model.translate(source, **options)
        print(f"source:      {source}\ntranslation: {translation}\nreference:   {reference}\n")
    more = "".join(f', {key}="{value}"' for key, value in options.items())
    print(f'In Python: import fairseq_tutel as ft; ft.from_checkpoint("{folder}").translate("…"{more})')


if __name__ == "__main__":
    main()
