"""Opens checkpoints with fairseq's hub, and adds hub interfaces for several languages and for images."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import hub_utils
from fairseq.models import FairseqEncoderDecoderModel, FairseqLanguageModel
from fairseq.models.bart import BARTHubInterface
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.registry import REGISTRIES
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask
from fairseq_cli.generate import get_symbols_to_strip_from_output
from omegaconf import OmegaConf, open_dict
from torch import nn

from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.opening.offload import STORES
from fairseq_tutel.plugin.training.task import InferenceMixin, give_mixin
from fairseq_tutel.vision.images import decoded, fitted, normalized, tensor_of

# For each value of --moe-inference-dtype, the `dtype` argument that has the same effect.
INFERENCE_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
# The minimum of max_tokens, as in fairseq-generate: a sentence may exceed training's max_tokens.
MAX_TOKENS = 12000
# Options of GPT-2's BPE, each with the name of its file next to a checkpoint. For every other BPE, fairseq
# finds the files itself.
GPT2_FILES = {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"}
# Tasks whose languages can be changed after the setup of the task.
MULTILINGUAL = (TranslationMultiSimpleEpochTask, TranslationFromPretrainedBARTTask)


def open_interface(
    files: Sequence[Path], data: Path, device: torch.device, dtype: torch.dtype, options: Mapping[str, Any]
) -> nn.Module:
    """Open one checkpoint, or several as an ensemble, and return the hub interface for the model.

    `options` replace options that are saved in the checkpoint.
    """
    folder = files[0].parent
    options = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    # A MoE model is built in the inference dtype, because a copy in fp32 might not fit into memory. The
    # checkpoint's saved value of --moe-inference-dtype is ignored.
    name = str(options.get("moe_inference_dtype", "auto"))
    dtype = INFERENCE_DTYPES.get(name, dtype)
    names = {each: name for name, each in INFERENCE_DTYPES.items()}
    built = {"moe_inference_dtype": names.get(dtype, "auto") if name == "auto" else name}
    # Models of an ensemble share an expert store. Each call of from_checkpoint opens a new store, because
    # an old store's cache would keep the experts of an earlier model.
    STORES.clear()
    beside = {key: str(folder / name) for key, name in GPT2_FILES.items() if (folder / name).is_file()}
    # Load the heads of RoBERTa and BART; treat each text of a denoising model as one sentence.
    own = {"load_checkpoint_heads": True, "sample_break_mode": "eos"}
    given = {**own, **beside, **options, **built}
    paths = os.pathsep.join(map(str, files))
    opened = hub_utils.from_pretrained(str(folder), paths, str(data), cpu=device.type == "cpu", **given)
    cfg, task, models = opened["args"], opened["task"], opened["models"]
    _settle(cfg, options)
    if not isinstance(task, InferenceMixin):  # The task of a dense model lacks the mixin.
        give_mixin(task)
    if dtype == torch.int8 and not all(map(moe_layers, models)):
        raise ValueError("dtype is torch.int8, but a model has no experts; give torch.bfloat16.")
    for model in models:
        model.to(device=device, dtype=torch.bfloat16 if dtype == torch.int8 else dtype)
    return _interface(cfg, task, models).to(device).eval()


def _settle(cfg: Any, options: Mapping[str, Any]) -> None:
    """Apply the user's BPE and tokenizer options, which fairseq would ignore.

    Without `_settle`, fairseq would use the saved kind of BPE, and BPE files next to the checkpoint instead
    of given files. `_settle` also raises max_tokens to at least `MAX_TOKENS`.
    """
    with open_dict(cfg):
        for key in ("bpe", "tokenizer"):
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


def _interface(cfg: Any, task: Any, models: Sequence[Any]) -> nn.Module:
    """Return the hub interface that fits the task and the models.

    Raises:
        ValueError: fairseq has no hub interface for the model, or its hub interface accepts no ensemble.
    """
    if hasattr(type(task), "class_names"):  # The task is image_classification.
        return ImageClassification(cfg, task, models)
    first, is_bart = models[0], hasattr(task, "mask_idx") or isinstance(task, SentencePredictionTask)
    kinds = {
        RobertaModel: RobertaHubInterface,
        FairseqLanguageModel: Generation,
        FairseqEncoderDecoderModel: BARTHubInterface if is_bart else Translation,
    }
    interface = next((kinds[kind] for kind in kinds if isinstance(first, kind)), None)
    if interface is None:
        raise ValueError(
            f"path names a {type(first).__name__} of the task {type(task).__name__}, for which there is no "
            "interface; open it with fairseq's checkpoint_utils.load_model_ensemble_and_task."
        )
    if issubclass(interface, Generation):
        return interface(cfg, task, models)
    if len(models) > 1:
        raise ValueError(f"path names {len(models)} checkpoints of a {type(first).__name__}; give one.")
    opened = interface(cfg, task, first)
    opened.bpe = opened.bpe or Words()
    return opened


class Words:
    """Stands in for a BPE if a model has none: a text consists of words separated by spaces."""

    def encode(self, text: str) -> str:
        """Return a text without changing it."""
        return text

    decode = encode


class Generation(hub_utils.GeneratorHubInterface):
    """Interface of a language model: `sample` continues a text, and `score` returns log-probabilities.

    A lock allows one call of the model at a time, because MoE layers store the arguments of a call.
    """

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, models)
        self.lock = threading.RLock()

    def generate(self, tokens: Any, beam: int = 5, *args: Any, **options: Any) -> Any:
        """Generate with beam search, and return fairseq's hypotheses for each sentence."""
        with self.lock:
            for model in self.models:
                # Without this call, BART's and mBART's attention keeps the largest earlier beam size.
                if hasattr(model, "set_beam_size"):
                    model.set_beam_size(beam)
            return super().generate(tokens, beam, *args, **options)


class Translation(Generation):
    """Interface of a translation model: `translate` for texts, and fairseq's `generate` for token ids."""

    score = None  # fairseq's `score` would ignore the source sentence.

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, models)
        self._stripped: dict[str | None, set[int]] = {}  # Special tokens by language.
        if isinstance(task, TranslationFromPretrainedBARTTask):
            task.args = task.cfg  # fairseq's task reads args, but never sets it.

    def translate(
        self,
        sentences: Any,
        beam: int = 5,
        verbose: bool = False,
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        **options: Any,
    ) -> Any:
        """Translate one sentence or a list of sentences; `options` are passed to `generate`.

        `source_lang` and `target_lang` select the languages of a multilingual model. A later call without
        language arguments uses the languages of the earlier call.

        Raises:
            ValueError: a language is missing or unknown.
        """
        with self.lock:
            self.set_languages({"source_lang": source_lang, "target_lang": target_lang})
            return self.sample(sentences, beam, verbose, **options)

    def set_languages(self, given: Mapping[str, str | None]) -> None:
        """Select the source_lang and target_lang of a multilingual model; None keeps the current one."""
        args = self.task.args if isinstance(self.task, MULTILINGUAL) else None
        for key, language in given.items():
            if args is None and language is None:
                continue
            languages = [] if args is None else _languages(self.task)
            own = getattr(args, key, None) if language is None else language
            if own not in languages:
                fix = f"give a language such as {languages[0]}" if languages else "remove it"
                raise ValueError(f"{key} is {own!r}, which is not a language of this model; {fix}.")
            setattr(args, key, own)
        if isinstance(self.task, TranslationMultiSimpleEpochTask):
            source, target = self.task.args.source_lang, self.task.args.target_lang
            self.task.source_langs, self.task.target_langs = [source], [target]
            shared = next(iter(self.task.dicts.values()))  # All languages share a dictionary.
            for language in (source, target):
                self.task.dicts.setdefault(language, shared)

    def string(self, tokens: torch.Tensor) -> str:
        """Convert tokens to text in the same way as fairseq-generate."""
        language = getattr(self.cfg.task, "target_lang", None)
        if isinstance(self.task, MULTILINGUAL):
            language = self.task.args.target_lang
        if language not in self._stripped:
            generator = self.task.build_generator(self.models, self.cfg.generation)
            self._stripped[language] = get_symbols_to_strip_from_output(generator)
        return self.tgt_dict.string(tokens, extra_symbols_to_ignore=self._stripped[language])


def _languages(task: Any) -> list[str]:
    return task.langs.split(",") if isinstance(task.langs, str) else list(task.langs)


class ImageClassification(nn.Module):
    """Interface of an image classifier, or of an ensemble of image classifiers."""

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cfg, self.task, self.lock = cfg, task, threading.RLock()
        self.models: Any = nn.ModuleList(models)

    @property
    def device(self) -> torch.device:
        """The device of the image classifier's parameters."""
        return next(self.parameters()).device

    def classify(self, images: Any, topk: int = 1) -> Any:
        """Return the `topk` most probable classes of each image, as pairs (name, probability).

        Args:
            images: a file, a uint8 array [height, width] or [height, width, channels], or a list of these.
            topk: the number of classes to return for an image.

        Raises:
            ValueError: an image cannot be read, or has a different number of channels than the model.
        """
        shape = tuple(getattr(images, "shape", ()))
        is_image = len(shape) == 2 or (len(shape) == 3 and shape[2] == self.task.channels)
        if is_image or isinstance(images, str | Path):
            return self.classify([images], topk)[0]
        names, like = self.task.class_names, next(self.parameters())
        found = []
        # Images are classified one at a time, so that any number of images fits into memory.
        for image in images:
            x_1CHW = self._normalised(image)[None].to(like)
            with torch.no_grad(), self.lock:
                each = [m.get_normalized_probs(m(x_1CHW), log_probs=False)[0] for m in self.models]
            best = torch.stack(each).float().mean(0).topk(min(topk, len(names)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found.append([(names[i], probability) for i, probability in pairs])
        return found

    def _normalised(self, image: Any) -> torch.Tensor:
        from PIL import Image

        channels, height, width = self.task.state.images["shape"]
        if isinstance(image, str | Path):
            image = decoded(str(image), channels)
        else:
            array = np.asarray(image)
            array = array[..., 0] if array.shape[2:] == (1,) else array
            if array.dtype != np.uint8 or array.shape[2:] != (3,) * (channels == 3):
                raise ValueError(
                    f"classify got an array of {array.dtype} {list(array.shape)}; give an array of uint8 "
                    f"[height, width, {channels}]."
                )
            image = Image.fromarray(array)
        return normalized(tensor_of(fitted(image, height, width)))
