"""Compares the dictionaries of a model and of a checkpoint by fingerprints in the checkpoint."""

import hashlib
from collections.abc import Mapping
from typing import Any

# The key in a checkpoint's extra state. The value maps module names, such as "decoder", to fingerprints.
KEY = "dictionaries"


def symbols_of(dictionary: Any) -> list[str]:
    """Return a fairseq dictionary's symbols, without those that a TruncatedDictionary leaves out."""
    return list(dictionary.symbols[: len(dictionary)])


def fingerprint(symbols: list[str]) -> str:
    """Return the number of symbols and a hash of the symbols and their order, such as "1000:9f86d081…"."""
    digest = hashlib.sha256("\n".join(symbols).encode()).hexdigest()
    return f"{len(symbols)}:{digest[:32]}"


def fingerprints_of(model: Any) -> dict[str, str]:
    """Return the fingerprint of the dictionary of each encoder and decoder, by the module's name."""
    found = {name: getattr(module, "dictionary", None) for name, module in model.named_modules()}
    return {name: fingerprint(symbols_of(d)) for name, d in found.items() if hasattr(d, "symbols")}


def refuse_other_dictionaries(found: Mapping[str, str], extra_state: Mapping[str, Any], path: Any) -> None:
    """Raise ValueError if a checkpoint's dictionary has other symbols, or another order, than the model's.

    Dictionaries of different lengths are not compared: models convert or reject embeddings of another size.
    Checkpoints of older versions and of stock fairseq have no fingerprints.
    """
    for name, own in found.items():
        other = str(extra_state.get(KEY, {}).get(name, own))
        if other != own and other.partition(":")[0] == own.partition(":")[0]:
            raise ValueError(
                f"{path} was saved with another dictionary of its {name}: the {own.partition(':')[0]} "
                "symbols or their order differ; give the dictionary of that run, or convert the checkpoint "
                "with `fairseq-tutel convert vocabulary`."
            )
