"""The tools `translate`, `sample` and `score` run a translation or language model on lines of text.

The results are written to standard output, in the order of the lines. An empty line has an empty result.
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_tutel.inference.options import StoreConfig
from fairseq_tutel.option import options_in
from fairseq_tutel.tools.arguments import at_least

logger = logging.getLogger(__name__)

TEXTS = {
    "translate": "Translate each line of a file.",
    "sample": "Continue each line of a file with a language model.",
    "score": "Print, for each line, a language model's mean log2-probability of a token, and the number of "
    "tokens, separated by a tab.",
}
# The lines of this number of batches are sorted by length together.
BATCHES = 32


def add_to(tools: Any) -> None:
    """Add the tools `translate`, `sample` and `score` as subcommands of `python -m fairseq_tutel`."""
    for kind, description in TEXTS.items():
        parser = tools.add_parser(kind, description=description, example="SAVE lines.txt")
        text = "a checkpoint, an ensemble of checkpoints joined by colons, or a --save-dir"
        parser.add_argument("model", metavar="MODEL", help=text)
        text = "a file with one text per line [standard input]"
        parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help=text)

        def add(flag: str, text: str, parser: Any = parser, **keywords: Any) -> None:
            parser.add_argument(flag, help=text, **keywords)

        count: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
        add("--batch-size", "maximum number of lines in a batch [64]", default=64, **count)
        store = options_in(StoreConfig)[0]
        text = f"{store.help} [{store.default}]"
        add("--expert-store", text, choices=store.choices, default=store.default)
        text = (
            "replace a saved option, such as bpe=sentencepiece, user_dir=DIR, or data=DIR for dictionaries"
        )
        add("--option", text, metavar="KEY=VALUE", action="append")
        add("--cpu", "run on the CPU", action="store_true")
        if kind != "score":
            add("--beam", "number of hypotheses of the beam search [5]", default=5, **count)
            text = "number of results per line; above 1, each begins with its score and a tab [1]"
            add("--nbest", text, default=1, **count)
            add("--max-len", "maximum number of tokens of a result [200]", default=200, **count)
        for side in ("source", "target") if kind == "translate" else ():
            text = f"{side} language [for a bilingual model, that of the data folder]"
            add(f"--{side}-lang", text, metavar="LANGUAGE")
        parser.set_defaults(run=partial(run, kind))


def run(kind: str, arguments: argparse.Namespace) -> None:
    """Read the lines, and print the results of the tool `kind` (see `TEXTS`) in the same order."""
    if kind != "score" and arguments.nbest > arguments.beam:
        raise ValueError(f"--nbest is {arguments.nbest}; give at most --beam, which is {arguments.beam}.")
    data = sys.stdin.buffer.read() if arguments.file is None else arguments.file.read_bytes()
    # str.splitlines would also split a line at characters such as a form feed.
    lines = data.decode().replace("\r\n", "\n").removesuffix("\n").split("\n") if data else []
    options: dict[str, Any] = {"score_reference": True}
    if kind != "score":
        # For a language model, fairseq counts the given text as a part of the result.
        longest = {"max_len_a": int(kind == "sample"), "max_len_b": arguments.max_len}
        options = {"beam": arguments.beam, **longest}
    from fairseq_tutel.parallel.progress import progress
    from fairseq_tutel.plugin.registration.process import refusals_are_sentences

    with refusals_are_sentences(), progress(kind, len(lines), "line") as advance:
        model = _opened(kind, arguments)
        size, cut, unknown = BATCHES * arguments.batch_size, 0, 0
        for start in range(0, len(lines), size):
            chunk = lines[start : start + size]
            encoded = [model.encode(line) for line in chunk if line.strip()]
            unknown += sum(bool((each[:-1] == model.src_dict.unk()).all()) for each in encoded)
            tokens = [_fitted(model, each) for each in encoded]
            cut += sum(len(one) > len(two) for one, two in zip(encoded, tokens, strict=True))
            found = iter(model.generate(tokens, **options) if tokens else ())
            for line in chunk:
                hypotheses = next(found) if line.strip() else ()
                print(*_printed(kind, model, hypotheses, getattr(arguments, "nbest", 1)), sep="\n")
            advance(len(chunk))
    if cut:
        logger.warning("%d of %d lines were longer than the model accepts, and were cut", cut, len(lines))
    if unknown:
        text = "%d of %d lines have no word of the dictionary; prepare the lines as for training"
        logger.warning(text, unknown, len(lines))


def _opened(kind: str, arguments: argparse.Namespace) -> Any:
    """Open the model; raise ValueError if the tool `kind` cannot use the model."""
    from omegaconf import OmegaConf

    from fairseq_tutel.plugin.hub import from_checkpoint
    from fairseq_tutel.plugin.hub_interfaces import Generation, Translation

    logging.getLogger("fairseq").setLevel(logging.WARNING)  # fairseq would log every batch.
    languages = {key: getattr(arguments, key, None) for key in ("source_lang", "target_lang")}
    options: dict[str, Any] = {key: value for key, value in languages.items() if value is not None}
    options |= OmegaConf.from_dotlist(arguments.option or [])
    options |= {"moe_expert_store": arguments.expert_store, "device": "cpu" if arguments.cpu else None}
    model = from_checkpoint(arguments.model, **options)
    if not isinstance(model, Generation) or isinstance(model, Translation) != (kind == "translate"):
        other = "sample or score" if kind == "translate" else "translate"
        raise ValueError(f"MODEL is {arguments.model}, which {kind} cannot use; try {other}.")
    if hasattr(model.task, "langs"):
        model.set_languages(languages)
    model.cfg.dataset.batch_size = arguments.batch_size
    return model


def _fitted(model: Any, tokens: Any) -> Any:
    """Cut a text's tokens to the length that the model accepts, but keep the last token."""
    limits = model.max_positions if isinstance(model.max_positions, tuple) else (model.max_positions,)
    # Multilingual models and language models add a token.
    limit = int(limits[0]) - (len(limits) == 1 or hasattr(model.task, "langs"))
    return tokens if len(tokens) <= limit else tokens[[*range(limit - 1), -1]]


def _printed(kind: str, model: Any, hypotheses: Sequence[Any], number: int) -> list[str]:
    """Return `number` output lines for one text: its first hypotheses, and then empty lines."""
    lines = []
    for hypothesis in hypotheses[:number]:
        score = f"{float(hypothesis['score']) / math.log(2):.4f}"
        text = " ".join(model.decode(hypothesis["tokens"]).split("\n"))
        if kind == "score":
            text = str(len(hypothesis["tokens"]))
        lines.append(f"{score}\t{text}" if kind == "score" or number > 1 else text)
    return lines + [""] * (number - len(lines))
