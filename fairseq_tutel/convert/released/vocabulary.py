"""Converts the tokenizer files of a Hugging Face folder to fairseq's dictionaries and BPE files.

The symbol of line n in dict.txt has the token ID n + 4, because fairseq's dictionaries begin with four
special symbols. All token IDs stay the same.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fairseq_tutel.convert.released.families.translation import languages_of_pair
from fairseq_tutel.convert.released.folder import ReleasedFolder
from fairseq_tutel.convert.released.table import Family
from fairseq_tutel.convert.safetensors_folder import write_text
from fairseq_tutel.files import content_of, shown

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
SENTENCEPIECE = "sentencepiece.bpe.model"
# Codes of languages in M2M100 (__en__), NLLB (eng_Latn) and mBART (en_XX).
LANGUAGE = re.compile(r"__(\w+)__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")
# Added tokens that fairseq has too, or that stand for unused rows.
OWN = re.compile(rf"{LANGUAGE.pattern}|<mask>|<?madeupword\d+>?")
# The languages of M2M100 models by `language_codes` of tokenizer_config.json, in the order of their tokens,
# which follow those of vocab.json.
LANGUAGES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
        "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr "
        "ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk "
        "ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}
# Files of tokenizers, which are copied in both directions.
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
    """The dictionary and BPE of a model.

    Attributes:
        files: content of the files to write, by name.
        links: further names of files.
        languages: codes of the languages that the dictionary has a symbol for.
        bpe: saved options of the BPE, with its name as `_name`.
        tokenizer: the same for the tokenizer that is used before the BPE.
        markers: special tokens that keep their IDs, but that our BPE cannot find in a text.
    """

    files: dict[str, str]
    links: dict[str, str] = field(default_factory=dict)
    languages: list[str] = field(default_factory=list)
    bpe: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    markers: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the files and links to a folder; links that exist stay."""
        for name, text in self.files.items():
            write_text(folder / name, text)
        for name, target in self.links.items():
            if not (folder / name).exists():
                (folder / name).symlink_to(target)


def sentencepiece_vocabulary(folder: ReleasedFolder, size: int, form: str = "") -> Vocabulary:
    """Return the vocabulary of a model with a SentencePiece tokenizer.

    Args:
        folder: the released folder.
        size: number of rows of the embedding table.
        form: form of a language's symbol, such as __{}__; empty if languages have no symbols.

    Raises:
        ValueError: files are missing or inconsistent.
    """
    tokens, added = tokens_of(folder)
    symbols = _checked(tokens, size)
    languages = []
    for i, symbol in enumerate(symbols):
        match = LANGUAGE.fullmatch(symbol) if form else None
        # An ordinary token may look like a code without underscores around it.
        if match and (match[1] or symbol in added):
            languages.append(match[1] or match[2])
            symbols[i] = form.format(languages[-1])
    bpe = {"_name": "sentencepiece", "sentencepiece_model": SENTENCEPIECE}
    links = {f"dict.{language}.txt": "dict.txt" for language in languages}
    return Vocabulary(
        {"dict.txt": dictionary(symbols)}, links, languages, bpe if folder.has(SENTENCEPIECE) else {}
    )


def gpt2_vocabulary(folder: ReleasedFolder, size: int) -> Vocabulary:
    """Return the vocabulary of a model with GPT-2's byte-level BPE.

    fairseq's symbols are numbers from encoder.json, which is written with the token IDs as numbers.

    Raises:
        ValueError: files are missing or inconsistent.
    """
    symbols = _checked(tokens_of(folder)[0], size)
    merges = _merges(folder)
    learned = {"".join(pair) for pair in merges}
    numbers = {s: i for i, s in enumerate(symbols) if s in learned or len(s) == 1}
    lines = [str(numbers[symbol]) if symbol in numbers else symbol for symbol in symbols]
    text = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges), ""])
    return Vocabulary(
        {"dict.txt": dictionary(lines), "encoder.json": json.dumps(numbers), "vocab.bpe": text},
        bpe={"_name": "gpt2", "gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"},
    )


def pair_vocabulary(folder: ReleasedFolder, languages: Sequence[str], sizes: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a model that has a dictionary for each of its two languages (FSMT).

    Their tokens end with </w> at the end of a word. Our symbols end with @@ within a word.
    """
    files = {}
    names = ("vocab-src.json", "vocab-tgt.json")
    for name, language, size in zip(names, languages, sizes, strict=True):
        tokens = {i: _subword(token) for token, i in _numbered(folder.json(name), name).items()}
        files[f"dict.{language}.txt"] = dictionary(_checked(tokens, size))
    codes = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in _merges(folder)), ""])
    source, target = languages
    return Vocabulary(
        files | {"bpecodes": codes},
        bpe={"_name": "subword_nmt", "bpe_codes": "bpecodes"},
        tokenizer={"_name": "moses", "source_lang": source, "target_lang": target},
    )


def _subword(token: str) -> str:
    if token in SPECIAL:
        return token
    return token.removesuffix("</w>") if token.endswith("</w>") else f"{token}@@"


def dictionary(symbols: Iterable[str]) -> str:
    """Return the content of dict.txt; the first four symbols are left out."""
    return "".join(f"{symbol} 1\n" for symbol in [*symbols][len(SPECIAL) :])


def _checked(tokens: Mapping[int, str], size: int) -> list[str]:
    """Return the symbols of all token IDs below `size`; a number without a token gets a made-up symbol.

    Raises:
        ValueError: the special tokens are not those of fairseq, a token is repeated, or there are too many.
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
        # dict.txt has one line per symbol.
        symbols.append(token if token and not {"\n", "\r"} & {*token} else next(spare))
    if len({*symbols}) < size:
        raise ValueError("INPUT has a token with two IDs; give the tokenizer files of one model.")
    return symbols


def tokens_of(folder: ReleasedFolder) -> tuple[dict[int, str], set[str]]:
    """Return the tokens by their IDs, and those that were added to the tokenizer's own tokens.

    Raises:
        ValueError: no tokenizer files exist.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    fast, config, special = (folder.json(name) if folder.has(name) else {} for name in files)
    added = {token["content"]: token["id"] for token in fast.get("added_tokens", ())}
    for number, token in config.get("added_tokens_decoder", {}).items():
        # Anything else is not a token ID, which `_numbered` refuses.
        added.setdefault(token["content"], int(number) if re.fullmatch("[0-9]{1,8}", number) else -1)
    if folder.has("added_tokens.json"):
        added |= folder.json("added_tokens.json")
    found = _own_tokens(folder, fast)
    if added:
        found |= {i: token for token, i in _numbered(added, "list of added tokens").items()}
    # Older folders list the languages without IDs; these follow, and the mask token is last.
    key = "additional_special_tokens"
    listed = [_text(entry) for entry in config.get(key) or special.get(key) or ()]
    if config.get("tokenizer_class") == "M2M100Tokenizer":
        codes = LANGUAGES.get(str(config.get("language_codes") or "m2m100"), "")
        listed = [f"__{code}__" for code in codes.split()] or listed
    mask = config.get("mask_token") or special.get("mask_token")
    taken = {*found.values()}
    for token in (*listed, *([_text(mask)] if mask else ())):
        if token not in taken:
            found[max(found) + 1] = token
            taken.add(token)
    return found, {*added, *listed}


def _markers(folder: ReleasedFolder) -> list[str]:
    """Return the special tokens of a tokenizer, except languages and those that fairseq's BPE finds.

    Raises:
        ValueError: words were added to the tokenizer, because fairseq's BPE would split them.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    fast, config, special, older = (folder.json(name) if folder.has(name) else {} for name in files)
    added = [*fast.get("added_tokens", ()), *config.get("added_tokens_decoder", {}).values()]
    known = {*SPECIAL, *map(_text, special.get("additional_special_tokens", ()))}
    known |= {token["content"] for token in added if token.get("special")}
    found = dict.fromkeys([token["content"] for token in added] + list(older))
    words = [word for word in found if word not in known and not OWN.fullmatch(word)]
    if words:
        raise ValueError(
            f"INPUT has words that were added to its tokenizer ({', '.join(map(shown, words[:3]))}), but "
            "fairseq's BPE splits them; remove them from the tokenizer files to convert the model without "
            "them."
        )
    return [token for token in found if token not in SPECIAL and not OWN.fullmatch(token)]


def _text(entry: Any) -> str:
    return str(entry["content"]) if isinstance(entry, dict) else str(entry)


def _own_tokens(folder: ReleasedFolder, fast: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens of the vocabulary; `fast` is the content of tokenizer.json, or empty."""
    if folder.has("vocab.json"):
        name, vocab = "vocab.json", folder.json("vocab.json")
    elif fast:
        name, vocab = "tokenizer.json", fast["model"]["vocab"]
        if isinstance(vocab, list):  # pairs of a token and its score
            vocab = {pair[0]: i for i, pair in enumerate(vocab)}
    elif folder.has(SENTENCEPIECE):
        return _pieces(folder)
    else:
        raise ValueError(
            f"INPUT {folder.path} has no tokenizer files (vocab.json, tokenizer.json or "
            f"{SENTENCEPIECE}); add the files of the model's tokenizer."
        )
    return {i: token for token, i in _numbered(vocab, name).items()}


def _numbered(vocab: Mapping[str, Any], name: str) -> Mapping[str, int]:
    if not vocab or not all(isinstance(i, int) and 0 <= i < 2**24 for i in vocab.values()):
        raise ValueError(f"INPUT has a {name} whose values are not token IDs; give another folder.")
    return vocab


def _pieces(folder: ReleasedFolder) -> dict[int, str]:
    """Return the tokens of a SentencePiece model, whose IDs are one higher than in the model."""
    try:
        import sentencepiece
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading {SENTENCEPIECE} needs sentencepiece, which is not installed; run pip install "
            "sentencepiece."
        ) from error
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.Load(str(folder.path / SENTENCEPIECE))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder.path / SENTENCEPIECE} is corrupt; replace the file.") from error
    pieces = {i + 1: model.IdToPiece(i) for i in range(3, model.GetPieceSize())}
    return dict(enumerate(SPECIAL)) | pieces


def _merges(folder: ReleasedFolder) -> list[tuple[str, str]]:
    """Return the merges of a BPE, from merges.txt or tokenizer.json."""
    name = "merges.txt" if folder.has("merges.txt") else "tokenizer.json"
    try:
        if name == "merges.txt":
            lines: Any = content_of(folder.path / name).decode().replace("\r\n", "\n").split("\n")
        else:
            lines = (folder.json(name).get("model") or {}).get("merges") or ()
        pairs = [tuple(line.split(" ") if isinstance(line, str) else line) for line in lines]
    except (AttributeError, OSError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder.path / name} has malformed merges of a BPE ({error}); replace the file."
        ) from error
    found = [(pair[0], pair[1]) for pair in pairs if len(pair) >= 2 and pair[0] != "#version:"]
    if not found:
        raise ValueError(f"INPUT {folder.path} has no merges of its BPE; add merges.txt.")
    return found


def vocabulary_of(
    folder: ReleasedFolder, family: Family, config: Mapping[str, Any], sizes: Mapping[str, int]
) -> Vocabulary:
    """Return the dictionaries and BPE of a released model.

    Args:
        folder: the released folder.
        family: the family of the model.
        config: the content of config.json.
        sizes: number of rows of each embedding table, by the name of its tensor.

    Raises:
        ValueError: tokenizer files are missing, malformed or inconsistent.
    """
    if not family.vocabulary:
        return Vocabulary({})
    try:
        if family.vocabulary == "pair":
            sides = [sizes[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
            found = pair_vocabulary(folder, languages_of_pair(config), sides)
        elif family.vocabulary == "gpt2":
            found = gpt2_vocabulary(folder, max(sizes.values()))
        else:
            found = sentencepiece_vocabulary(folder, max(sizes.values()), family.form)
        return replace(found, markers=_markers(folder))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"INPUT {folder.path} has malformed tokenizer files ({error!r}); replace these files."
        ) from error
