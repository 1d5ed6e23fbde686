"""Refuses checkpoints whose options contain code, because fairseq passes some options to eval().

fairseq evaluates these options when it builds the task, model or criterion. Without this check, a file
could run code even if it contains no pickled code.
"""

import argparse
import ast
import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_tutel.checkpoint.files import is_pipe, walk
from fairseq_tutel.files import printable, shown

# All options that fairseq passes to eval(). tests/plugin/test_literals.py derives this list.
EVALUATED = frozenset({
    "adafactor_eps", "adam_betas", "adamax_betas", "adaptive_input_cutoff", "adaptive_softmax_cutoff",
    "character_filters", "conv_aggregator_layers", "conv_dec_config", "conv_enc_config",
    "conv_feature_layers", "decoder_attention", "decoder_glu", "decoder_kernel_size_list", "decoder_layers",
    "decoder_zero_init", "downsample", "encoder_attention", "encoder_glu", "encoder_kernel_size_list",
    "encoder_layers", "extra_data", "extra_lang_pairs", "feature_encoder_spec", "gated_attention",
    "lamb_betas", "langtoks", "left_pad_source", "left_pad_target", "model_overrides", "pipeline_balance",
    "pipeline_decoder_balance", "pipeline_decoder_devices", "pipeline_devices", "pipeline_encoder_balance",
    "pipeline_encoder_devices", "pretrained", "project_input", "sampling_weights", "self_attention",
    "transformer_context", "transformer_dec_config", "transformer_enc_config", "transformer_sampling",
    "vggblock_enc_config", "weight_softmax", "wer_args", "xformers_att_config",
})  # fmt: skip
# fairseq passes the options encoder_KEY and decoder_KEY as KEY to its encoder and decoder.
PREFIXES = ("encoder_", "decoder_")
# Limits of an option's length, and of the number of values that it makes, such as "[0] * 10**12".
LONGEST, MOST_VALUES = 10_000, 10_000
# Types that options in a checkpoint may have. Attributes of other objects are not read.
PLAIN = (
    type(None), bool, int, float, str, bytes, list, tuple, dict, Enum, argparse.Namespace,
    np.generic, np.ndarray, torch.Tensor, torch.dtype, torch.device,
)  # fmt: skip
# Maximum number of layers. No real model has more, and building a larger one would take hours.
MOST_LAYERS = 10_000
# Parts of a configuration whose options name files that fairseq opens.
OPENED = ("task", "model", "bpe", "tokenizer")
# The only accepted interpolation: the name of another option, which is also checked.
REFERENCE = re.compile(r"\$\{[\w.]+\}")


def refuse_code(state: Mapping[str, Any], path: str, given: Mapping[str, Any]) -> None:
    """Raise an error if an option that fairseq passes to eval() is not a literal.

    Lists and tuples may be added and multiplied, as in wav2vec's "[(512, 10, 5)] + [(512, 3, 2)] * 4".
    Values that equal the user's own overrides (`given`) are accepted.
    """
    for key, value in options_within({name: state.get(name) for name in ("cfg", "args")}):
        name = key if key in EVALUATED else key.partition("_")[2] if key.startswith(PREFIXES) else ""
        problem = ""
        if not isinstance(value, PLAIN) and not OmegaConf.is_config(value):
            problem = f"an object of the class {type(value).__name__} as the option {key}"
        elif isinstance(value, str) and "${" in REFERENCE.sub("", value):
            problem = f"{shown(value)} as the option {key}, which calls a function of OmegaConf"
        if problem:
            raise ValueError(f"{path} has {problem}; give a file with plain values.")
        if name not in EVALUATED or (key in given and given[key] == value) or _is_harmless(value):
            continue
        raise ValueError(
            f"{path} has {shown(value)} as the option {key}, which fairseq would run as code; give a file "
            "in which the option is a literal (a number, text, list, tuple or dictionary), or repeat the "
            "value in --model-overrides if you trust it."
        )


def refuse_unusable_options(state: Mapping[str, Any], path: str) -> None:
    """Raise an error if an option names a pipe or a missing option, or asks for too many layers."""
    cfg = state.get("cfg")
    # If fairseq converted the command line of an older file, options may refer to missing ones.
    if OmegaConf.is_config(cfg) and state.get("args") is None:
        _refuse_missing_references(cfg, path)
    for key, value in options_within({part: (cfg or {}).get(part) for part in OPENED}):
        if key.endswith("layers") and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(
                f"{path} has {value} as the option {key}; give a file with at most {MOST_LAYERS:,} layers."
            )
        if isinstance(value, str) and is_pipe(value):
            raise ValueError(
                f"{path} has {shown(value)} as the option {key}, which is a pipe, device or socket; give a "
                "checkpoint whose option names an ordinary file."
            )


def _refuse_missing_references(cfg: Any, path: str) -> None:
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        reason = printable(str(error).partition("\n")[0])
        raise ValueError(
            f"{path} has an option that refers to a missing one ({reason}); give a file with plain values."
        ) from error


def is_literal(text: str) -> bool:
    """Return whether eval(text) is safe: the text runs no code and does not create a huge object."""
    if not text.strip():
        return True  # eval() raises an error
    if len(text) > LONGEST:
        return False
    try:
        return _count(ast.parse(text.lstrip(" \t"), mode="eval").body) <= MOST_VALUES
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def options_within(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of every option in nested dicts, lists and configurations."""
    for container, key, value in walk(tree, _opened):
        yield (str(key) if isinstance(container, dict) else ""), value


def _opened(node: Any) -> Any:
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=False)
    return vars(node) if isinstance(node, argparse.Namespace) else node


def _is_harmless(value: Any) -> bool:
    if isinstance(value, str):
        is_reference = REFERENCE.fullmatch(value) is not None
        return is_literal(value) or (is_reference and value[2:-1].rpartition(".")[2] in EVALUATED)
    # Other types are not harmless, because eval() also accepts bytes and code objects.
    is_plain = value is None or isinstance(value, bool | int | float | np.generic | list | tuple | dict)
    return is_plain or OmegaConf.is_config(value)


def _count(node: ast.expr) -> int:
    """Return an upper bound of the number of values in a parsed literal; reject other expressions."""
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
        if all(map(_is_number, sides)):
            return 1
        return math.prod(_count(side) * _most_repeats(side) for side in sides)
    raise ValueError(type(node).__name__)


def _most_repeats(node: ast.expr) -> int:
    """Return an upper bound of the number by which an expression can repeat a list, as in [0] * 3."""
    if not _is_number(node):
        return 1
    constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return math.prod(max(2, abs(value)) for value in constants if isinstance(value, int))


def _is_number(node: ast.expr) -> bool:
    """Return whether a parsed expression consists only of numbers, without lists or strings."""
    return all(
        isinstance(n, ast.UnaryOp)
        or (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add | ast.Sub | ast.Mult))
        or (isinstance(n, ast.Constant) and not isinstance(n.value, str | bytes))
        for n in ast.walk(node)
        if isinstance(n, ast.expr)
    )
