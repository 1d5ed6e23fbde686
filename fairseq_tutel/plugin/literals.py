"""Options of a checkpoint that stock fairseq passes to eval(): only literals are accepted.

A checkpoint holds its options as text. Stock fairseq evaluates some of them when it builds the task, model
or criterion, so a file without any pickled code could run code.
"""

import argparse
import ast
import math
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

# Every option that fairseq's sources pass to eval(). tests/plugin/test_literals.py derives this list.
EVALUATED = frozenset({
    "adafactor_eps", "adam_betas", "adamax_betas", "adaptive_input_cutoff",
    "adaptive_softmax_cutoff", "character_filters", "conv_aggregator_layers", "conv_dec_config",
    "conv_enc_config", "conv_feature_layers", "decoder_attention", "decoder_glu",
    "decoder_kernel_size_list", "decoder_layers", "decoder_zero_init", "downsample",
    "encoder_attention", "encoder_glu", "encoder_kernel_size_list", "encoder_layers",
    "extra_data", "extra_lang_pairs", "feature_encoder_spec", "gated_attention", "lamb_betas",
    "langtoks", "left_pad_source", "left_pad_target", "model_overrides", "pipeline_balance",
    "pipeline_decoder_balance", "pipeline_decoder_devices", "pipeline_devices",
    "pipeline_encoder_balance", "pipeline_encoder_devices", "pretrained", "project_input",
    "sampling_weights", "self_attention", "transformer_context", "transformer_dec_config",
    "transformer_enc_config", "transformer_sampling", "vggblock_enc_config", "weight_softmax",
    "wer_args", "xformers_att_config",
})  # fmt: skip
# fairseq copies encoder_KEY and decoder_KEY of the options to KEY of its encoder and decoder.
PREFIXES = ("encoder_", "decoder_")
# Longest accepted text in characters, and most values that it may stand for: "[0] * 10**12" needs no code.
LONGEST, MOST_VALUES = 10_000, 10_000
SHOWN = 60


def refuse_code(state: Mapping[str, Any], path: str, given: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that has anything but a literal where fairseq evaluates an option.

    Lists and tuples may be added and multiplied, as in wav2vec's "[(512, 10, 5)] + [(512, 3, 2)] * 4".

    Args:
        state: the checkpoint, as fairseq loads it.
        path: of the file.
        given: the user's own overrides. A value that equals one of them is the user's, not the file's.

    Raises:
        ValueError: names the file, the option and its value.
    """
    for key, value in options_within({name: state.get(name) for name in ("cfg", "args")}):
        name = (
            key if key in EVALUATED else key.partition("_")[2] if key.startswith(PREFIXES) else ""
        )
        if name not in EVALUATED or (key in given and given[key] == value) or _is_harmless(value):
            continue
        shown = ascii(value)
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
        raise ValueError(
            f"{path} has {shown} as its option {key}, which fairseq would run as code; give a file with a "
            "literal there (a number, text, list, tuple or dictionary)."
        )


def is_literal(text: str) -> bool:
    """Whether eval(text) could only make a value of limited size: no name, call or attribute is in it."""
    if not text.strip():
        return True  # eval() refuses it
    if len(text) > LONGEST:
        return False
    try:
        return _count(ast.parse(text.lstrip(" \t"), mode="eval").body) <= MOST_VALUES
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def options_within(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, at any depth; a pickled tree may contain itself."""
    open_nodes: list[Any] = [tree]
    seen: list[Any] = []
    while open_nodes:
        node = open_nodes.pop()
        if OmegaConf.is_config(node):
            node = OmegaConf.to_container(node, resolve=False)
        if isinstance(node, argparse.Namespace):
            node = vars(node)
        if not isinstance(node, dict | list | tuple) or any(node is other for other in seen):
            continue
        seen.append(node)
        if isinstance(node, dict):
            yield from ((key, value) for key, value in node.items() if isinstance(key, str))
        open_nodes.extend(node.values() if isinstance(node, dict) else node)


def _is_harmless(value: Any) -> bool:
    if isinstance(value, str):
        # An interpolation may name another option of the list, which is looked at itself.
        reference = value.removeprefix("${").removesuffix("}")
        is_reference = value == f"${{{reference}}}" and reference.replace(".", "_").isidentifier()
        return is_literal(value) or (is_reference and reference.rpartition(".")[2] in EVALUATED)
    # eval() takes bytes and code, too.
    is_plain = value is None or isinstance(value, bool | int | float | list | tuple | dict)
    return is_plain or OmegaConf.is_config(value)


def _count(node: ast.expr) -> int:
    """Return at most how many values an expression stands for.

    Raises:
        ValueError: it is no literal.
    """
    if isinstance(node, ast.Constant):
        return len(node.value) if isinstance(node.value, str | bytes) else 1
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return 1 + sum(map(_count, node.elts))
    if isinstance(node, ast.Dict) and None not in node.keys:
        return 1 + sum(_count(part) for part in [*node.keys, *node.values] if part is not None)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _count(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return _count(node.left) + _count(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = node.left, node.right
        return math.prod(_count(side) * _most_repeats(side) for side in sides)
    raise ValueError(type(node).__name__)


def _most_repeats(node: ast.expr) -> int:
    """Return at most how often a factor repeats the other one; once if it is no number."""
    inner = list(ast.walk(node))
    if any(isinstance(n, ast.List | ast.Tuple | ast.Set | ast.Dict) for n in inner):
        return 1
    constants = [n.value for n in inner if isinstance(n, ast.Constant)]
    return math.prod(max(2, abs(value)) for value in constants if isinstance(value, int))
