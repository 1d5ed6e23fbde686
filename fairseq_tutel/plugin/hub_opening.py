"""Opens checkpoints with fairseq's hub, and replaces fairseq's errors by clear messages."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from fairseq import hub_utils
from fairseq.data.encoders import BPE_REGISTRY, TOKENIZER_REGISTRY
from fairseq.registry import REGISTRIES
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fairseq_tutel.files import printable
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.hub_interfaces import Interface, interface_of
from fairseq_tutel.plugin.opening.offload import STORES
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.plugin.registration.process import (
    ENCODER_FILE,
    REASON,
    is_machine_error,
    is_refusal,
    sentence_of,
)
from fairseq_tutel.plugin.training.task import InferenceMixin, give_mixin

ENCODERS = {"bpe": BPE_REGISTRY, "tokenizer": TOKENIZER_REGISTRY}
# The dtype argument of each value of --moe-inference-dtype.
INFERENCE_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
# Minimum of max_tokens, as in fairseq-generate, because training's value may be shorter than a sentence.
MAX_TOKENS = 12000
# Option of GPT-2's BPE -> its file next to a checkpoint. fairseq finds the files of other kinds of BPE.
GPT2_FILES = {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"}


def open_interface(
    files: Sequence[Path],
    data: Path,
    device: torch.device,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    known: Collection[str],
) -> Interface:
    """Open one checkpoint, or several as an ensemble, and return the interface for this kind of model.

    `options` replace saved options; `known` are the keys of the saved options.
    """
    folder = files[0].parent
    options = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    name = str(options.get("moe_inference_dtype", "auto"))
    dtype = _dtype_of(dtype, name)
    # A MoE model is built in this dtype, because a copy in fp32 might not fit into memory. A value that
    # the training run saved has no effect.
    names = {each: name for name, each in INFERENCE_DTYPES.items()}
    built = {"moe_inference_dtype": names.get(dtype, "auto") if name == "auto" else name}
    # Models of an ensemble share an expert store. A model of an earlier call would leave its experts in the
    # cache of a shared store.
    STORES.clear()
    beside = {key: str(folder / name) for key, name in GPT2_FILES.items() if (folder / name).is_file()}
    try:
        opened = hub_utils.from_pretrained(
            str(files[0].parent),
            os.pathsep.join(map(str, files)),
            str(data),
            cpu=device.type == "cpu",
            # Load the heads of RoBERTa and BART; treat each text of a denoising model as one sentence.
            **{
                "load_checkpoint_heads": True,
                "sample_break_mode": "eos",
                **beside,
                **options,
                **built,
            },
        )
        cfg, task, models = opened["args"], opened["task"], opened["models"]
        _refuse_unknown(options, known, any(map(moe_layers, models)))
        _settle(cfg, options)
        if not isinstance(task, InferenceMixin):  # a dense model
            give_mixin(task)
        if dtype == torch.int8 and not all(map(moe_layers, models)):
            raise ValueError("dtype is torch.int8, but a model has no experts; give torch.bfloat16.")
        for model in models:
            model.to(device=device, dtype=torch.bfloat16 if dtype == torch.int8 else dtype)
        return interface_of(models[0], task)(cfg, task, models).to(device).eval()
    except Exception as error:
        text = _text_of(error, files, data)
        if text is None:
            raise
        raise ValueError(printable(text).replace("\n", " ")) from error


def _dtype_of(dtype: torch.dtype, name: str) -> torch.dtype:
    """Return the dtype for the argument `dtype` and the option moe_inference_dtype; refuse two dtypes."""
    wanted = INFERENCE_DTYPES.get(name, dtype)
    # float32 is the default, and with int8 all other weights are in bfloat16.
    if dtype not in (torch.float32, torch.bfloat16, wanted):
        raise ValueError(f"dtype is {dtype}, but moe_inference_dtype is {name}; remove one of them.")
    return wanted


def _text_of(error: Exception, files: Sequence[Path], data: Path) -> str | None:
    """Return a sentence that explains an error of fairseq; None if the error is already clear."""
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename:
        return (
            f"{error.filename} does not exist, but the task of {files[0]} needs it; give `data`, the "
            "folder with the dictionaries of the training run."
        )
    # A multilingual model without a given language looks up the language None.
    if "infer language pair" in text or (isinstance(error, KeyError) and error.args == (None,)):
        return (
            f"{data} does not contain the languages of {files[0]}; add source_lang=… and target_lang=…, or "
            "give `data`, the folder of the training run."
        )
    if isinstance(error, OmegaConfBaseException):
        if missing := re.search(r"'(\w+)': '\?\?\?'", text):
            return f"{error.full_key} needs the option {missing[1]}; give both options."
        reason = text.partition("\n")[0]
        return f"{error.full_key or 'an option'}: {reason[:1].lower()}{reason[1:]}."
    if found := ENCODER_FILE.fullmatch(text):
        return (
            f"{found[1]} does not exist, but {files[0]} needs it to read text; put it into "
            f"{files[0].parent}, or give its path as an option, such as sentencepiece_model=…."
        )
    if is_refusal(error) or is_machine_error(error) or isinstance(error, ImportError | OSError):
        return None
    reason = f"{type(error).__name__}: {error}"[:REASON]
    return sentence_of(error) or (
        f"{files[0]} cannot be opened with these options ({reason}); remove options, or give another "
        "checkpoint."
    )


def _settle(cfg: Any, options: Mapping[str, Any]) -> None:
    """Apply the user's options of bpe and tokenizer, which fairseq would ignore.

    fairseq uses the saved kind of bpe, and prefers files next to the checkpoint. This function also raises
    a small max_tokens.
    """
    with open_dict(cfg):
        for key in ENCODERS:
            saved = (cfg[key] or {}).get("_name") if not isinstance(cfg[key], str) else cfg[key]
            name = options.get(key, saved)
            dataclass = REGISTRIES[key]["dataclass_registry"].get(name)
            if dataclass is None:
                cfg[key] = name
                continue
            now = cfg[key] if name == saved else OmegaConf.structured(dataclass)
            given = {f.name: options[f.name] for f in fields(dataclass) if f.name in options}
            cfg[key] = OmegaConf.merge(now, given, {"_name": name})
        if "max_tokens" not in options and cfg.dataset.max_tokens:
            cfg.dataset.max_tokens = max(cfg.dataset.max_tokens, MAX_TOKENS)


def _refuse_unknown(options: Mapping[str, Any], known: Collection[str], has_experts: bool) -> None:
    """Raise an error if options are unknown or have no effect, because fairseq would ignore them."""
    ours = {option.key for owner in ("task", "model") for option in options_of(owner)}
    for key in [] if has_experts else sorted(options.keys() & ours):
        if key.startswith("moe_"):
            raise ValueError(f"{key} has no effect on a model without experts; remove it.")
    known = {*known, *ours, *ENCODERS, "user_dir", "generation_args"}
    for key, registry in ENCODERS.items():
        name = options.get(key)
        if name is not None and name not in registry:
            raise ValueError(f"{key} is {name}; give one of {', '.join(sorted(registry))}.")
        dataclass = REGISTRIES[key]["dataclass_registry"].get(name)
        known |= {field.name for field in fields(dataclass)} if dataclass else set()
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(
            f"{unknown[0]} is not an option of this model, its task or a run; remove it, or find the right "
            "name in docs/flags.md or fairseq's help, where options have dashes."
        )
