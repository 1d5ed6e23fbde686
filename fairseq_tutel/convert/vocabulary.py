"""Fits the embeddings and the output projection of a checkpoint to another dictionary."""

import argparse
import io
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint import dictionaries
from fairseq_tutel.checkpoint.dictionaries import fingerprint, symbols_of
from fairseq_tutel.checkpoint.saved import PARTS, SavedModel
from fairseq_tutel.convert.configs import task_of
from fairseq_tutel.convert.meta import OWN_DICTIONARIES
from fairseq_tutel.convert.released.vocabulary import SPECIAL, Vocabulary
from fairseq_tutel.convert.sharded import to_full
from fairseq_tutel.plugin.hub import data_folder

# Names of tensors with one row per symbol; an adaptive input or softmax has a tensor per frequency band.
TABLE = re.compile(
    r"(?P<bands>.*(embed_tokens\.embeddings|adaptive_softmax))"
    r"\.(\d+\.0\.weight|head\.(word_proj\.(1\.)?)?weight|tail\.\d+\.2\.weight)"
    r"|.*\b(embed_tokens\.weight|output_projection\.weight|embed_out|(lm_head|fc_out)\.(weight|bias))"
)
# Forms of a language's token in fairseq's tasks. Endings mark denoising and mined data, as in __en_dae__.
FORMS, ENDINGS = ("__{}__", "[{}]", "<{}>"), ("", "_dae", "_mined")
Examples = Mapping[str, Sequence[str]]  # For a new symbol, the old symbols whose rows are averaged.


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert vocabulary`."""
    data, like, added = arguments.data, arguments.like, arguments.add_languages or []
    if not (data or arguments.add_words or added):
        raise ValueError("no new dictionary is given; give --data, --add-words or --add-languages.")
    plugin.register()
    saved = SavedModel.open(inputs[0], keep_shards=True)
    options = saved.options_of("task")
    folder = data_folder(arguments.old_data, str(options.get("data") or ""), inputs[0].parent)
    old = task_of(saved, {"data": str(folder)})
    languages = list(getattr(old, "langs", None) or [])
    shown = f"the task {saved.name('task')} of INPUT has the --langs {','.join(languages) or 'none'}"
    if added and ("langs" not in options or not languages or {*languages} & {*added}):
        raise ValueError(f"--add-languages is {','.join(added)}, but {shown}; give others, or --add-words.")
    if like and not (added and like in languages):
        raise ValueError(f"--like is {like}, but {shown}; give one of these, and --add-languages.")
    langs = [*languages, *added]
    changed: dict[str, Any] = {**OWN_DICTIONARIES, "data": str(data.absolute()) if data else ""}
    if added:
        is_text = isinstance(options["langs"], str)
        changed |= {"langs": ",".join(langs) if is_text else langs, "lang_dict": None}
    vocabulary = Vocabulary({})
    with tempfile.TemporaryDirectory() as temporary:
        if not data:
            vocabulary = _extended(options, folder, arguments.add_words, languages, added)
            vocabulary.write(Path(temporary))
        new = task_of(saved, {**changed, "data": str(data or temporary)})
    old_tokens = list(zip(*map(_tokens, [like] if like else languages), strict=True))
    examples = {new: old for code in added for new, old in zip(_tokens(code), old_tokens, strict=True)}
    apart = {*SPECIAL, *(token for language in languages for token in _tokens(language))}
    lines = _convert(saved, old, new, examples, apart)
    for part in map(saved.options_of, PARTS):
        part |= {key: value for key, value in changed.items() if key in part}
    vocabulary.write(output.parent)
    to_full(saved, output)
    order = f" and --langs {','.join(langs)}" if added else ""
    lines.append(f"optimizer state was dropped; train it with --finetune-from-model{order}")
    return "".join(f"\n{line}" for line in lines)


def _extended(
    options: Mapping[str, Any], folder: Path, words: Path | None, languages: list[str], added: list[str]
) -> Vocabulary:
    """Return a task's dictionaries with the words of a file added, and dictionaries of new languages."""
    from fairseq.data import Dictionary

    fixed = options.get("fixed_dictionary")
    paths = [Path(fixed)] if fixed else sorted(folder.glob("dict*.txt"))
    if not paths or options.get("source_dict") or options.get("target_dict"):
        raise ValueError(f"{folder} has no dict*.txt of this task, to which to add words; give --data.")
    lines = words.read_text(encoding="utf-8").split("\n") if words else []
    found = dict.fromkeys(word for line in lines if (word := re.split("[ \t\r]", line)[0]))
    names = [f"dict.{language}.txt" for language in ((*languages, *added) if fixed else added)]
    first: dict[str, str] = {}  # For each text, the first file with this text; later files become links.
    links = {path.name: first.setdefault(path.read_text(encoding="utf-8"), path.name) for path in paths}
    if names and len(first) > 1:
        raise ValueError("INPUT's languages have different dictionaries; give --data with --add-languages.")
    links |= dict.fromkeys(names, paths[0].name)
    files = {}
    for text, name in first.items():
        known = Dictionary.load(io.StringIO(text))
        files[name] = text + "".join(f"{word} 1\n" for word in found if word not in known)
    return Vocabulary(files, {link: name for link, name in links.items() if link != name})


def _tokens(language: str) -> list[str]:
    return [form.format(language + ending) for form in FORMS for ending in ENDINGS]


def _convert(
    saved: SavedModel, old: Any, new: Any, examples: Examples, apart: Collection[str]
) -> list[str]:
    """Fit a checkpoint's tables to new dictionaries, in place; return a line for each dictionary."""
    tables: dict[str, list[str]] = {}
    for name in saved.weights:
        if match := TABLE.fullmatch(name):
            tables.setdefault(match["bands"] or name, []).append(name)
    if not tables:
        raise ValueError(f"INPUT names {saved.path}, whose model has no dictionary; give another file.")
    weights, lines, before, after = dict(saved.weights), {}, {}, {}
    tied: dict[tuple, Tensor] = {}  # Tensors that share memory before fitting also share it afterwards.
    for owner, (*bands, last) in tables.items():
        symbols, made = (symbols_of(_dictionary(task, owner, weights)) for task in (old, new))
        prints = fingerprint(symbols), fingerprint(made)
        table, start = weights[last], len(symbols) - len(weights[last])
        # The head of an adaptive softmax may have one more row for each of the other bands.
        if sum(len(weights[name]) for name in bands) - start not in (0, len(bands)):
            raise ValueError(
                f"{owner} of INPUT does not have {len(symbols)} rows, one for each symbol of the training "
                "run's dictionary; give the folder of its dictionaries as --old-data."
            )
        if bands and made[: len(symbols)] != symbols:
            raise ValueError(
                f"{owner} has bands of frequent and rare symbols, so new symbols must follow the old ones; "
                "give --add-words instead, or use fairseq-preprocess --srcdict."
            )
        key = (table.data_ptr(), *prints)
        tied[key] = weights[last] = (
            tied[key] if key in tied else fitted(table, symbols[start:], made[start:], examples, apart)
        )
        module, is_input, _ = owner.partition(".embed_tokens")
        if is_input:
            before[module], after[module] = prints
        lines[prints] = f"{len(symbols)} -> {len(made)} symbols, {len({*symbols} & {*made})} kept"
    dictionaries.refuse_other_dictionaries(before, saved.state.get("extra_state") or {}, saved.path)
    saved.restart(weights)
    saved.state["extra_state"][dictionaries.KEY] = after
    return list(lines.values())


def _dictionary(task: Any, name: str, weights: Collection[str]) -> Any:
    """Return the dictionary that has a symbol for each row of the table `name`."""
    encoder = re.compile(r"(^|\.)encoder\.")
    # In a language model, the decoder's embeddings belong to the source dictionary.
    is_source = encoder.search(name) or ("embed_tokens" in name and not any(map(encoder.search, weights)))
    if pair := re.match(r"models\.([^.-]+)-([^.]+)\.", name):  # multilingual_translation
        return task.dicts[pair[1] if is_source else pair[2]]
    return task.source_dictionary if is_source else task.target_dictionary


def fitted(
    table: Tensor, old: list[str], new: list[str], examples: Examples, apart: Collection[str]
) -> Tensor:
    """Return a table [V', …] with the rows of the new symbols, from a table [V, …] of the old symbols.

    A symbol that is not in `old` gets the mean of its `examples`' rows or, without examples, the mean of
    all rows except those of the symbols `apart`.
    """
    index = {symbol: i for i, symbol in enumerate(old)}

    def mean(symbols: Collection[str]) -> Tensor:
        rows = table[[index[symbol] for symbol in symbols]]
        return rows.mean(0, dtype=torch.float64).to(table.dtype)  # The mean of a single row is exact.

    usual = mean([symbol for symbol in index if symbol not in apart] or index)
    rows = []
    for symbol in new:
        like = [symbol] if symbol in index else [s for s in examples.get(symbol, ()) if s in index]
        rows.append(mean(like) if like else usual)
    return torch.stack(rows)
