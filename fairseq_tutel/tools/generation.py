"""The tools translate, sample and score run a translation or language model on lines of text.

The results are written to standard output, in the order of the lines. An empty line has an empty result.
"""

import argparse
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_tutel.inference.options import StoreConfig
from fairseq_tutel.option import options_in
from fairseq_tutel.tools.arguments import above_0, at_least

logger = logging.getLogger(__name__)

TEXTS = {
    "translate": "Translate each line of a file.",
    "sample": "Continue each line of a file with a language model.",
    "score": "Print, for each line, a language model's mean log2-probability of a token, and the number of "
    "tokens, separated by a tab.",
}
# Number of batches whose lines are sorted by length together.
BATCHES = 32


def add_to(tools: Any) -> None:
    """Add the tools `translate`, `sample` and `score` as subcommands of `python -m fairseq_tutel`."""
    for kind, text in TEXTS.items():
        parser = tools.add_parser(kind, description=text, example="SAVE lines.txt")
        text = "a checkpoint, an ensemble of checkpoints joined by colons, or a --save-dir"
        parser.add_argument("model", metavar="MODEL", help=text)
        text = "a file with one text per line [standard input]"
        parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help=text)
        text = "maximum number of lines in a batch [64]"
        parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help=text)
        text = "folder with the dictionaries [the data folder of the training run]"
        parser.add_argument("--dictionaries", metavar="FOLDER", help=text)
        parser.add_argument("--user-dir", metavar="FOLDER", help="folder that defines a custom model")
        store = options_in(StoreConfig)[0]
        text = f"{store.help} [{store.default}]"
        parser.add_argument("--expert-store", choices=store.choices, default=store.default, help=text)
        parser.add_argument("--cpu", action="store_true", help="run on the CPU")
        if kind != "score":
            text = "number of hypotheses of the beam search [5]"
            parser.add_argument("--beam", type=at_least(1), default=5, metavar="N", help=text)
            text = "number of results per line; above 1, each begins with its score and a tab [1]"
            parser.add_argument("--nbest", type=at_least(1), default=1, metavar="N", help=text)
            text = "maximum number of tokens of a result [as saved with the model]"
            parser.add_argument("--max-len", type=at_least(1), metavar="N", help=text)
        if kind == "translate":
            for side in ("source", "target"):
                text = f"{side} language [for a bilingual model, that of the data folder]"
                parser.add_argument(f"--{side}-lang", metavar="LANGUAGE", help=text)
        if kind == "sample":
            text = "draw each token from the N most probable ones instead of a beam search"
            parser.add_argument("--sampling-topk", type=at_least(1), metavar="N", help=text)
            text = "divisor of the logits in --sampling-topk [1.0]"
            parser.add_argument("--temperature", type=above_0, default=1.0, metavar="X", help=text)
            text = "random seed of --sampling-topk [1]"
            parser.add_argument("--seed", type=int, default=1, metavar="N", help=text)
        parser.set_defaults(run=partial(run, kind))


def run(kind: str, arguments: argparse.Namespace) -> None:
    """Read the lines, and print the results of the tool `kind` (see `TEXTS`) in the same order."""
    if kind != "score" and arguments.nbest > arguments.beam:
        raise ValueError(f"--nbest is {arguments.nbest}; give at most --beam, which is {arguments.beam}.")
    from fairseq_tutel.parallel.progress import progress

    model, lines = _opened(kind, arguments), _lines_of(arguments.file)
    options = _options_of(kind, arguments)
    number = getattr(arguments, "nbest", 1)
    cut = 0
    with progress(kind, len(lines), "line") as advance:
        size = BATCHES * arguments.batch_size
        for start in range(0, len(lines), size):
            chunk = lines[start : start + size]
            encoded = [model.encode(line) for line in chunk if line.strip()]
            tokens = [_fitted(model, each) for each in encoded]
            cut += sum(len(one) > len(two) for one, two in zip(encoded, tokens, strict=True))
            found = iter(model.generate(tokens, **options) if tokens else ())
            for line in chunk:
                results = _printed(kind, model, next(found), number) if line.strip() else [""] * number
                print(*results, sep="\n")
            advance(len(chunk))
    if cut:
        logger.warning("%d of %d lines were longer than the model accepts, and were cut", cut, len(lines))


def _lines_of(file: Path | None) -> list[str]:
    # str.splitlines would also split at characters such as a form feed.
    text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n") if text else []


def _opened(kind: str, arguments: argparse.Namespace) -> Any:
    """Open the model; raise ValueError if the tool `kind` cannot use the model."""
    from fairseq_tutel.plugin.hub import from_checkpoint
    from fairseq_tutel.plugin.hub_interfaces import Generation, Translation

    languages = {key: getattr(arguments, key, None) for key in ("source_lang", "target_lang")}
    options = {"moe_expert_store": arguments.expert_store, "user_dir": arguments.user_dir, **languages}
    options = {key: value for key, value in options.items() if value is not None}
    logging.getLogger("fairseq").setLevel(logging.WARNING)  # fairseq would log every batch.
    device = "cpu" if arguments.cpu else None
    model = from_checkpoint(arguments.model, arguments.dictionaries, device=device, **options)
    other = "translate" if isinstance(model, Translation) else "sample or score"
    if not isinstance(model, Generation) or isinstance(model, Translation) != (kind == "translate"):
        fix = f"use {other}" if isinstance(model, Generation) else "give another model"
        raise ValueError(f"MODEL is {arguments.model}, whose model {kind} cannot use; {fix}.")
    if hasattr(model.task, "langs"):
        model.set_languages(languages)
    model.cfg.dataset.batch_size = arguments.batch_size
    return model


def _options_of(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of fairseq's generator for the tool `kind`."""
    if kind == "score":
        return {"score_reference": True}
    options: dict[str, Any] = {"beam": arguments.beam}
    if arguments.max_len is not None:
        options |= {"max_len_a": 0, "max_len_b": arguments.max_len}
    if getattr(arguments, "sampling_topk", None) is not None:
        import torch

        torch.manual_seed(arguments.seed)
        options |= {"sampling": True, "sampling_topk": arguments.sampling_topk}
        options["temperature"] = arguments.temperature
    return options


def _fitted(model: Any, tokens: Any) -> Any:
    """Shorten a text's tokens to the number that the model accepts, and keep the last token."""
    limits = model.max_positions if isinstance(model.max_positions, tuple) else (model.max_positions,)
    # Multilingual models and language models add a token.
    limit = int(limits[0]) - (len(limits) == 1 or hasattr(model.task, "langs"))
    if len(tokens) <= limit:
        return tokens
    import torch

    return torch.cat([tokens[: limit - 1], tokens[-1:]])


def _printed(kind: str, model: Any, hypotheses: Sequence[Any], number: int) -> Iterator[str]:
    """Yield the output lines of one text, one for each of the first `number` hypotheses."""
    for hypothesis in hypotheses[:number]:
        score = f"{float(hypothesis['score']) / math.log(2):.4f}"
        if kind == "score":
            yield f"{score}\t{len(hypothesis['tokens'])}"
            continue
        text = " ".join(model.decode(hypothesis["tokens"]).split("\n"))
        yield f"{score}\t{text}" if number > 1 else text
