"""Converts the tokenizer of a Hugging Face folder to fairseq's dictionaries and BPE files.

Line n of dict.txt, counted from 0, has the symbol with the token ID n + 4, because fairseq's dictionaries
begin with four special symbols. The token IDs of the Hugging Face model do not change.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fairseq_tutel.convert.released.families.translation import languages_of_pair
from fairseq_tutel.convert.released.folder import ReleasedFolder
from fairseq_tutel.convert.released.output import write_text
from fairseq_tutel.convert.released.table import Family
from fairseq_tutel.files import shown

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
SENTENCEPIECE = "sentencepiece.bpe.model"
# Language codes in M2M100 (__en__), NLLB (eng_Latn) and mBART (en_XX) match this pattern.
LANGUAGE = re.compile(r"__(\w+)__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")
# Tokens that fairseq also has, and placeholders for unused rows of the embedding table, match this pattern.
OWN = re.compile(rf"{LANGUAGE.pattern}|<mask>|<?madeupword\d+>?")
# Names of tokenizer files, which `convert from-hf` and `convert to-hf` copy.
TOKENIZER_FILES = (
    SENTENCEPIECE,
    "added_tokens.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
)


@dataclass
class Vocabulary:
    """The dictionary and BPE of a model."""

    # File names and the texts to write to the files.
    files: dict[str, str]
    # Names of symbolic links, and the files in `files` to which they refer.
    links: dict[str, str] = field(default_factory=dict)
    # Codes of the languages that have a symbol in the dictionary.
    languages: list[str] = field(default_factory=list)
    # Saved options of the BPE; the option `_name` is the BPE's name.
    bpe: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    # Special tokens that keep their IDs, but that fairseq's BPE cannot find in a text.
    markers: list[str] = field(default_factory=list)
    # The tokenizer's class name; empty if the folder has no tokenizer.
    kind: str = ""

    def write(self, folder: Path) -> None:
        """Write the files and links to a folder; raise ValueError if a file exists with other content."""
        for name in (*self.files, *self.links):
            text, file = self.files.get(self.links.get(name, name)), folder / name
            if file.exists() and file.read_text(encoding="utf-8") != text:
                raise ValueError(f"{file} is another dictionary; give an --output in another folder.")
        for name, text in self.files.items():
            write_text(folder / name, text)
        for name, target in self.links.items():
            if not (folder / name).exists():
                (folder / name).symlink_to(target)


def vocabulary_of(
    folder: ReleasedFolder, family: Family, config: Mapping[str, Any], sizes: Mapping[str, int]
) -> Vocabulary:
    """Return the dictionaries and the BPE of a Hugging Face model.

    Args:
        folder: the Hugging Face folder.
        family: the family of the model.
        config: the content of config.json.
        sizes: the number of rows of each embedding table, by tensor name.

    Raises:
        ValueError: tokenizer files are missing, malformed or inconsistent.
    """
    if not family.vocabulary:
        return Vocabulary({})
    tokenizer = _tokenizer(folder, is_fast=family.vocabulary == "gpt2")
    if family.vocabulary == "pair":
        sides = [sizes[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
        found = _pair_vocabulary(tokenizer, languages_of_pair(config), sides)
    elif family.vocabulary == "gpt2":
        found = _gpt2_vocabulary(tokenizer, max(sizes.values()))
    else:
        found = _sentencepiece_vocabulary(tokenizer, max(sizes.values()), family.form)
        found = found if folder.has(SENTENCEPIECE) else replace(found, bpe={})
    return replace(found, markers=_markers(tokenizer), kind=type(tokenizer).__name__)


def _tokenizer(folder: ReleasedFolder, is_fast: bool) -> Any:
    """Read the tokenizer of a folder with transformers; no code of the folder runs."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            "reading a tokenizer needs transformers, which is not installed; run pip install "
            "'fairseq-tutel[hf]'."
        ) from error
    # Without tokenizer.json, the slow tokenizer class reads the SentencePiece model.
    use_fast = is_fast or folder.has("tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(
            folder.path, use_fast=use_fast, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises many exception types.
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"INPUT {folder.path} has tokenizer files that transformers cannot read "
            f"({type(error).__name__}: {shown(reason)}); add or replace the files of this model."
        ) from error


def _special(tokenizer: Any) -> dict[str, int]:
    """Return the IDs of special tokens, including M2M100's language tokens, which have a separate list."""
    found = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    return found | getattr(tokenizer, "lang_token_to_id", {})


def _tokens(tokenizer: Any) -> dict[int, str]:
    """Return a dictionary from token IDs to tokens, including special tokens."""
    return {i: token for token, i in (tokenizer.get_vocab() | _special(tokenizer)).items()}


def _sentencepiece_vocabulary(tokenizer: Any, size: int, form: str) -> Vocabulary:
    """Return the vocabulary of a model with a SentencePiece tokenizer.

    `size` is the number of rows of the embedding table. `form` is the pattern of a language's symbol, such
    as __{}__, or empty if languages have no symbols.
    """
    symbols, languages = _checked(_tokens(tokenizer), size), []
    special = _special(tokenizer)
    for i, symbol in enumerate(symbols):
        match = LANGUAGE.fullmatch(symbol) if form and symbol in special else None
        if match:
            languages.append(match[1] or match[2])
            symbols[i] = form.format(languages[-1])
    bpe = {"_name": "sentencepiece", "sentencepiece_model": SENTENCEPIECE}
    links = {f"dict.{language}.txt": "dict.txt" for language in languages}
    return Vocabulary({"dict.txt": dictionary(symbols)}, links, languages, bpe)


def _gpt2_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Return the vocabulary of a model with GPT-2's byte-level BPE.

    In fairseq, this BPE's symbols are numbers from encoder.json. The converter writes token IDs there.
    """
    symbols = _checked(_tokens(tokenizer), size)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    learned = {"".join(pair) for pair in pairs}
    numbers = {s: i for i, s in enumerate(symbols) if s in learned or len(s) == 1}
    lines = [str(numbers[symbol]) if symbol in numbers else symbol for symbol in symbols]
    return Vocabulary(
        {"dict.txt": dictionary(lines), "encoder.json": json.dumps(numbers), "vocab.bpe": _codes(pairs)},
        bpe={"_name": "gpt2", "gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"},
    )


def _pair_vocabulary(tokenizer: Any, languages: list[str], sizes: list[int]) -> Vocabulary:
    """Return the vocabulary of an FSMT model, which has a dictionary for each of its two languages.

    In transformers, a token at the end of a word ends with </w>. In fairseq, all other tokens end with @@.
    """
    files = {}
    sides = {i: token for token, i in tokenizer.encoder.items()}, tokenizer.decoder
    for own, language, size in zip(sides, languages, sizes, strict=True):
        tokens = {i: _subword(token) for i, token in own.items()}
        files[f"dict.{language}.txt"] = dictionary(_checked(tokens, size))
    source, target = languages
    return Vocabulary(
        files | {"bpecodes": _codes(sorted(tokenizer.bpe_ranks, key=tokenizer.bpe_ranks.get))},
        bpe={"_name": "subword_nmt", "bpe_codes": "bpecodes"},
        tokenizer={"_name": "moses", "source_lang": source, "target_lang": target},
    )


def _subword(token: str) -> str:
    if token in SPECIAL:
        return token
    return token.removesuffix("</w>") if token.endswith("</w>") else f"{token}@@"


def _codes(merges: Iterable[tuple[str, ...]]) -> str:
    """Return the content of the BPE merges file of subword-nmt."""
    return "\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges), ""])


def dictionary(symbols: Iterable[str]) -> str:
    """Return the content of dict.txt, which omits fairseq's first four symbols."""
    return "".join(f"{symbol} 1\n" for symbol in [*symbols][len(SPECIAL) :])


def _checked(tokens: Mapping[int, str], size: int) -> list[str]:
    """Return the symbols of all token IDs below `size`; an ID without a token gets a made-up symbol.

    Raises:
        ValueError: special tokens differ from fairseq's, a token is repeated, or there are too many tokens.
    """
    for i, special in enumerate(SPECIAL):
        if tokens.get(i) != special:
            raise ValueError(
                f"INPUT has the token {shown(tokens.get(i))} with the ID {i}, but fairseq's dictionaries "
                f"begin with {' '.join(SPECIAL)}; give a model with these token IDs."
            )
    if max(tokens) >= size:
        raise ValueError(
            f"INPUT has token IDs up to {max(tokens)}, but its embedding table has {size} rows; give the "
            "tokenizer files of this model."
        )
    taken = set(tokens.values())
    spare = (name for i in range(2 * size) if (name := f"madeupword{i:04d}") not in taken)
    symbols: list[str] = []
    for i in range(size):
        token = tokens.get(i, "")
        # dict.txt has one line per symbol, so a symbol must not contain a line break.
        symbols.append(token if token and not {"\n", "\r"} & {*token} else next(spare))
    if len({*symbols}) < size:
        raise ValueError("INPUT has a token with two IDs; give the tokenizer files of one model.")
    return symbols


def _markers(tokenizer: Any) -> list[str]:
    """Return the special tokens of a tokenizer that fairseq's BPE cannot find in a text.

    Raises:
        ValueError: words were added to the tokenizer, and fairseq's BPE would split these words.
    """
    added = [
        token
        for token in tokenizer.added_tokens_decoder.values()
        if token.content not in SPECIAL and not OWN.fullmatch(token.content)
    ]
    if words := [token.content for token in added if not token.special]:
        raise ValueError(
            f"INPUT has words that were added to its tokenizer ({', '.join(map(shown, words[:3]))}), but "
            "fairseq's BPE splits them; remove them from the tokenizer files to convert the model without "
            "them."
        )
    return [token.content for token in added]
