"""Refuses checkpoints whose options contain code, because fairseq passes some options to eval().

fairseq evaluates options as Python code when it builds the task, model or criterion. Without the check for
literals, a checkpoint could run code even if it contains no pickled code.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from fairseq_tutel.checkpoint.files import walk
from fairseq_tutel.files import shown

# Names of all options that fairseq 0.12 passes to eval().
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
# fairseq passes the value of encoder_KEY to the encoder as KEY, and decoder_KEY to the decoder as KEY.
PREFIXES = ("encoder_", "decoder_")
# Syntax tree nodes of literals, and of addition and multiplication, which wav2vec's options contain.
LITERAL = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.UAdd, ast.USub,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Load,
)  # fmt: skip
# Types that options in a checkpoint may have. Objects of other types are refused: using them may run code.
PLAIN = (
    type(None), bool, int, float, str, bytes, list, tuple, dict, Enum, argparse.Namespace,
    np.generic, np.ndarray, torch.Tensor, torch.dtype, torch.device,
)  # fmt: skip
# An option may refer to another option by ${NAME}; the other option is checked, too.
REFERENCE = re.compile(r"\$\{[\w.]+\}")


def refuse_code(state: Mapping[str, Any], path: str, given: Mapping[str, Any]) -> None:
    """Raise an error if an option that fairseq passes to eval() is not a literal.

    Lists and tuples may be added and multiplied, as in wav2vec's "[(512, 10, 5)] + [(512, 3, 2)] * 4".
    An option is accepted if it equals an override (`given`) of the user.
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


def is_literal(text: str) -> bool:
    """Return whether eval(text) runs no code: the text consists of numbers, strings and containers."""
    if not text.strip():
        return True  # eval() of an empty text only raises an error.
    try:
        parsed = ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, LITERAL) for node in ast.walk(parsed))


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
    # bytes and code objects are refused, because eval() runs them, too.
    is_plain = value is None or isinstance(value, bool | int | float | np.generic | list | tuple | dict)
    return is_plain or OmegaConf.is_config(value)
