"""Reads which experts to keep from a JSON file, such as experts.json of naver/nllb-pruning.

The file has one of these forms:

- {"encoder_3": [0, 5, …], …}: expert IDs per MoE layer. encoder.layers.3 names the same layer. Layers that
  are not in the file keep all experts.
- [0, 5, 130, …]: global IDs; layer n of the MoE layers (encoder first) has the IDs n * E to n * E + E - 1.
- {"eng_Latn": [0, 5, …], …} or {"eng_Latn-fra_Latn": […], …}: global IDs per language or pair. The experts
  of some pairs are kept: in the encoder, those of the source languages; in the decoder, of the target's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_tutel.files import json_of, shown

FORMS = (
    'give a JSON file such as {"encoder_3": [0, 5]}, a list of global IDs, or a file of naver/nllb-pruning '
    "with --keep-for"
)


def kept_experts(
    path: Path, pairs: Sequence[str], layers: Sequence[str], num_experts: int, top_k: int
) -> dict[str, list[int]]:
    """Return the sorted IDs of the experts to keep in each MoE layer.

    Args:
        path: the file, the value of --keep-experts.
        pairs: language pairs such as eng_Latn-fra_Latn, the values of --keep-for.
        layers: prefixes of the MoE layers' names in model order, such as encoder.layers.3.
        num_experts: number of experts of each layer.
        top_k: number of experts per token, of which a layer needs at least as many.

    Raises:
        ValueError: the file cannot be read, or does not fit the model or the pairs.
    """
    try:
        content = json_of(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--keep-experts names {path}, which cannot be read ({error}); {FORMS}."
        ) from error
    encoders = sum(name.startswith("encoder") for name in layers)
    if pairs:
        kept = _by_layer(path, _of_pairs(path, content, pairs, encoders * num_experts), layers, num_experts)
    elif isinstance(content, list):
        kept = _by_layer(path, content, layers, num_experts)
    else:
        kept = _named(path, content, layers, num_experts)
    for layer, ids in kept.items():
        if len(ids) < top_k:
            raise ValueError(
                f"--keep-experts names {path}, which keeps {len(ids)} experts in {layer}, but each token "
                f"uses {top_k}; keep at least {top_k}."
            )
    return kept


def _named(path: Path, content: Any, layers: Sequence[str], num_experts: int) -> dict[str, list[int]]:
    named = {layer.replace(".layers.", "_"): layer for layer in layers} | {layer: layer for layer in layers}
    kept = {layer: list(range(num_experts)) for layer in layers}
    if not isinstance(content, dict) or not content:
        raise ValueError(f"--keep-experts names {path}, which has another form; {FORMS}.")
    for name, ids in content.items():
        if name not in named:
            raise ValueError(
                f"--keep-experts names {path}, which has the key {shown(name)}, but the MoE layers are "
                f"{', '.join(list(named)[: len(layers)])}; correct the key, or add --keep-for if the keys "
                "are languages."
            )
        kept[named[name]] = _checked(path, ids, num_experts)
    return kept


def _by_layer(path: Path, ids: Any, layers: Sequence[str], num_experts: int) -> dict[str, list[int]]:
    kept: dict[str, list[int]] = {layer: [] for layer in layers}
    for i in _checked(path, ids, num_experts * len(layers)):
        kept[layers[i // num_experts]].append(i % num_experts)
    return kept


def _of_pairs(path: Path, content: Any, pairs: Sequence[str], border: int) -> list[int]:
    """Return the global IDs of all pairs. IDs below `border` belong to the encoder."""
    if not isinstance(content, dict):
        raise ValueError(
            f"--keep-for is given, but --keep-experts names {path}, which has no languages; remove "
            "--keep-for."
        )
    found: set[int] = set()
    for pair in pairs:
        if pair in content:
            found |= {*_checked(path, content[pair])}
            continue
        source, _, target = pair.partition("-")
        for language, is_decoder in ((source, False), (target, True)):
            if language not in content:
                raise ValueError(
                    f"--keep-for has {shown(pair)}, but {path} has no list for "
                    f"{language or 'a language'}; give pairs such as eng_Latn-fra_Latn, with languages of "
                    "that file."
                )
            found |= {i for i in _checked(path, content[language]) if (i >= border) == is_decoder}
    return sorted(found)


def _checked(path: Path, ids: Any, count: int | None = None) -> list[int]:
    """Return sorted expert IDs without duplicates; raise ValueError for anything else."""
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ValueError(
            f"--keep-experts names {path}, which has {shown(ids)} in place of expert IDs; {FORMS}."
        )
    if wrong := [i for i in ids if i < 0 or (count is not None and i >= count)]:
        raise ValueError(
            f"--keep-experts names {path}, which has the expert ID {shown(wrong[0])}, but the IDs are 0 to "
            f"{'…' if count is None else count - 1}; give the list of this model."
        )
    return sorted({*ids})
