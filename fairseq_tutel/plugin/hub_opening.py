"""Opens checkpoints with fairseq's hub."""

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

from fairseq_tutel.option import key_of
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.hub_interfaces import Interface, interface_of
from fairseq_tutel.plugin.opening.offload import STORES
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.plugin.registration.process import LANGUAGES, is_refusal
from fairseq_tutel.plugin.training.task import InferenceMixin, give_mixin

ENCODERS = {"bpe": BPE_REGISTRY, "tokenizer": TOKENIZER_REGISTRY}
# The dtype argument of each value of --moe-inference-dtype.
INFERENCE_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
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
    # A MoE model is built in this dtype, because a copy in fp32 might not fit into memory. A value that
    # the training run saved has no effect.
    name = str(options.get("moe_inference_dtype", "auto"))
    dtype = INFERENCE_DTYPES.get(name, dtype)
    names = {each: name for name, each in INFERENCE_DTYPES.items()}
    built = {"moe_inference_dtype": names.get(dtype, "auto") if name == "auto" else name}
    # Models of an ensemble share an expert store. A model of an earlier call would leave its experts in the
    # cache of a shared store.
    STORES.clear()
    beside = {key: str(folder / name) for key, name in GPT2_FILES.items() if (folder / name).is_file()}
    # Load the heads of RoBERTa and BART; treat each text of a denoising model as one sentence.
    own = {"load_checkpoint_heads": True, "sample_break_mode": "eos"}
    given = {**own, **beside, **options, **built}
    paths = os.pathsep.join(map(str, files))
    try:
        opened = hub_utils.from_pretrained(str(folder), paths, str(data), cpu=device.type == "cpu", **given)
        cfg, task, models = opened["args"], opened["task"], opened["models"]
        _refuse_unknown(options, known)
        _settle(cfg, options)
        if not isinstance(task, InferenceMixin):  # a dense model
            give_mixin(task)
        if dtype == torch.int8 and not all(map(moe_layers, models)):
            raise ValueError("dtype is torch.int8, but a model has no experts; give torch.bfloat16.")
        for model in models:
            model.to(device=device, dtype=torch.bfloat16 if dtype == torch.int8 else dtype)
        return interface_of(models[0], task)(cfg, task, models).to(device).eval()
    except Exception as error:
        text = _text_of(error, files[0], data)
        if text is None:
            raise
        raise ValueError(text) from error


def _text_of(error: Exception, file: Path, data: Path) -> str | None:
    """Return a sentence for Python users; None if the error is already clear."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return (
            f"{error.filename} does not exist, but the task of {file} needs it; give `data`, the folder "
            "with the dictionaries of the training run."
        )
    # A multilingual model without a given language looks up the language None.
    if LANGUAGES.search(str(error)) or (isinstance(error, KeyError) and error.args == (None,)):
        return (
            f"{data} does not contain the languages of {file}; add source_lang=… and target_lang=…, or "
            "give `data`, the folder of the training run."
        )
    # In Python, options have the names of flags with underscores.
    return FLAG.sub(lambda found: key_of(found[0]), str(error)) if is_refusal(error) else None


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


def _refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise an error if options are unknown, because fairseq would ignore them."""
    ours = {option.key for owner in ("task", "model") for option in options_of(owner)}
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
