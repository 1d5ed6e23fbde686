"""Fits the embeddings and the output projection of a checkpoint to another dictionary."""

import argparse
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

# Tensors with one row for each symbol. Adaptive inputs and an adaptive softmax have one for each band.
TABLE = re.compile(
    r"(?P<bands>.*(embed_tokens\.embeddings|adaptive_softmax))"
    r"\.(\d+\.0\.weight|head\.(word_proj\.(1\.)?)?weight|tail\.\d+\.2\.weight)"
    r"|.*\b(embed_tokens\.weight|output_projection\.weight|embed_out|(lm_head|fc_out)\.(weight|bias))"
)
# Tokens of a language in fairseq's tasks, and the endings of its name for other kinds of data.
FORMS, ENDINGS = ("__{}__", "[{}]", "<{}>"), ("", "_dae", "_mined")


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert vocabulary`."""
    data, like, added = arguments.data, arguments.like, arguments.add_languages or []
    if not (data or arguments.add_words or added):
        raise ValueError("no new dictionary is given; give --data, --add-words or --add-languages.")
    plugin.register()
    saved = SavedModel.open(inputs[0], keep_shards=True)
    options = saved.options_of("task")
    folder = data_folder(arguments.old_data, str(options.get("data") or ""), inputs[0].parent)
    old = _task(saved, folder, {})
    languages = list(getattr(old, "langs", None) or [])
    shown = f"the task {saved.name('task')} of INPUT has the --langs {','.join(languages) or 'none'}"
    if added and ("langs" not in options or not languages or {*languages} & {*added}):
        raise ValueError(f"--add-languages is {','.join(added)}, but {shown}; give others, or --add-words.")
    if like and not (added and like in languages):
        raise ValueError(f"--like is {like}, but {shown}; give one of these, and --add-languages.")
    langs = [*languages, *added]
    changed: dict[str, Any] = {**OWN_DICTIONARIES, "data": str(data.absolute()) if data else ""}
    if added:
        changed |= {"langs": ",".join(langs) if isinstance(options["langs"], str) else langs}
        changed |= {"lang_dict": None}
    vocabulary = Vocabulary({})
    with tempfile.TemporaryDirectory() as temporary:
        if not data:
            vocabulary = _extended(options, folder, arguments.add_words, languages, added)
            vocabulary.write(Path(temporary))
        new = _task(saved, data or Path(temporary), changed)
    examples = {
        token: [tokens[i] for tokens in map(_tokens, [like] if like else languages)]
        for language in added
        for i, token in enumerate(_tokens(language))
    }
    apart = {*SPECIAL, *(token for language in languages for token in _tokens(language))}
    lines = _convert(saved, old, new, examples, apart)
    for part in map(saved.options_of, PARTS):
        part |= {key: value for key, value in changed.items() if key in part}
    vocabulary.write_new(output.parent)
    to_full(saved, output)
    order = f" and --langs {','.join(langs)}" if added else ""
    lines.append(f"optimizer state was dropped; train it with --finetune-from-model{order}")
    return "".join(f"\n{line}" for line in lines)


def _task(saved: SavedModel, folder: Path, changed: Mapping[str, Any]) -> Any:
    try:
        return task_of(saved, {**changed, "data": str(folder)})
    except Exception as error:  # fairseq's tasks raise many types, such as AssertionError
        raise ValueError(
            f"{folder} has no dictionaries for the task {saved.name('task')} of INPUT ({error}); give the "
            "folder of the old ones as --old-data, and the folder of the new ones as --data."
        ) from error


def _extended(
    options: Mapping[str, Any], folder: Path, words: Path | None, languages: list[str], added: list[str]
) -> Vocabulary:
    """Return a task's dictionary files with the words of a file, and the files of added languages."""
    from fairseq.data import Dictionary

    fixed = options.get("fixed_dictionary")
    paths = [Path(fixed)] if fixed else sorted(folder.glob("dict*.txt"))
    if not paths or options.get("source_dict") or options.get("target_dict"):
        raise ValueError(f"{folder} has no dict*.txt of this task, to which to add words; give --data.")
    if words and not words.is_file():
        raise ValueError(f"--add-words is {words}, which is no file; give a text with one word a line.")
    lines = words.read_text(encoding="utf-8").split("\n") if words else []
    found = dict.fromkeys(word for line in lines if (word := re.split("[ \t\r]", line)[0]))
    files = {}
    for path in paths:
        known, text = Dictionary.load(str(path)), path.read_text(encoding="utf-8")
        files[path.name] = text + "".join(f"{word} 1\n" for word in found if word not in known)
    names = [f"dict.{language}.txt" for language in ((*languages, *added) if fixed else added)]
    if names and len({*files.values()}) > 1:
        raise ValueError("INPUT's languages have different dictionaries; give --data with --add-languages.")
    return Vocabulary(files, dict.fromkeys(names, next(iter(files))))


def _tokens(language: str) -> list[str]:
    return [form.format(language + ending) for form in FORMS for ending in ENDINGS]


def _convert(
    saved: SavedModel, old: Any, new: Any, examples: Mapping[str, list[str]], apart: Collection[str]
) -> list[str]:
    """Replace the tables of a checkpoint, in place; return a line for each pair of dictionaries."""
    groups: dict[str, list[str]] = {}
    for name in saved.weights:
        if match := TABLE.fullmatch(name):
            groups.setdefault(match["bands"] or name, []).append(name)
    if not groups:
        raise ValueError(f"{saved.flag} names {saved.path}, whose model has no dictionary; give another.")
    weights, lines = dict(saved.weights), {}
    tied: dict[tuple, list[Tensor]] = {}  # tensors that share memory before share it afterwards
    before, after = {}, {}
    for owner, names in groups.items():
        symbols, made = (symbols_of(_dictionary(task, owner, weights)) for task in (old, new))
        prints = fingerprint(symbols), fingerprint(made)
        module, is_input, _ = owner.partition(".embed_tokens")
        if is_input:
            before[module], after[module] = prints
        kept = len({*symbols} & {*made})
        counts = f"{kept} kept, {len(made) - kept} new, {len(symbols) - kept} dropped"
        lines[prints] = f"{len(symbols)} -> {len(made)} symbols: {counts}"
        tables = [weights[name] for name in names]
        key = (*(table.data_ptr() for table in tables), *prints)
        if key not in tied:
            tied[key] = fitted(tables, symbols, made, examples, apart, owner)
        weights |= zip(names, tied[key], strict=True)
    dictionaries.refuse_other_dictionaries(before, saved.state, saved.path)
    saved.restart(weights)
    saved.state["extra_state"][dictionaries.KEY] = after
    return list(lines.values())


def _dictionary(task: Any, name: str, weights: Collection[str]) -> Any:
    """Return the dictionary whose symbols are the rows of a table."""
    encoder = re.compile(r"(^|\.)encoder\.")
    # In a language model, the embeddings of the decoder are those of the source.
    is_source = encoder.search(name) or ("embed_tokens" in name and not any(map(encoder.search, weights)))
    if pair := re.match(r"models\.([^.-]+)-([^.]+)\.", name):  # multilingual_translation
        return task.dicts[pair[1] if is_source else pair[2]]
    return task.source_dictionary if is_source else task.target_dictionary


def fitted(
    tables: Sequence[Tensor],
    old: Sequence[str],
    new: Sequence[str],
    examples: Mapping[str, Collection[str]],
    apart: Collection[str],
    owner: str,
) -> list[Tensor]:
    """Return tables with one row for each new symbol, from tables with one row for each old symbol.

    Args:
        tables: the bands of a dictionary, in order; often one. The first of an adaptive softmax ends with a
            row for each other band.
        old: the old symbols, for which the tables have rows.
        new: the new symbols. Symbols without an old row start at the mean of the old rows of their band.
        examples: new symbol -> old symbols; its row starts at the mean of their rows.
        apart: old symbols that are left out of the mean of all rows.
        owner: name of the tables, for messages.

    Raises:
        ValueError: the tables have other rows, or a symbol moves to another band.
    """
    extra = sum(map(len, tables)) - len(old)
    if extra not in (0, len(tables) - 1):
        raise ValueError(
            f"INPUT has {extra + len(old)} rows in {owner}, but its dictionary has {len(old)} symbols; "
            "give the folder of the training run's dictionaries as --old-data."
        )
    found: list[Tensor] = []
    start = 0
    for table in tables:
        rows = len(table) - (0 if found else extra)
        index = {symbol: i for i, symbol in enumerate(old[start : start + rows])}
        symbols = new[start : None if table is tables[-1] else start + rows]
        moved = ({*symbols} & {*old}) - index.keys()
        if moved or not symbols:
            raise ValueError(
                f"{owner} has bands of frequent and rare symbols, but {min(moved, default='the last one')} "
                "would change its band; keep the old order (--add-words, or fairseq-preprocess --srcdict)."
            )
        words = [i for symbol, i in index.items() if symbol not in apart] or list(index.values())
        made = [table[words].float().mean(0).to(table.dtype)] * len(symbols)
        for i, symbol in enumerate(symbols):
            like = [index[other] for other in examples.get(symbol, ()) if other in index]
            if symbol in index:
                made[i] = table[index[symbol]]
            elif like:
                made[i] = table[like].float().mean(0).to(table.dtype)
        found.append(torch.cat([torch.stack(made), table[rows:]]))
        start += rows
    return found
