"""Models in use from Python: fairseq's own hub interfaces, by what a model is, and how they are opened."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from fairseq import hub_utils
from fairseq.data.encoders import BPE_REGISTRY, TOKENIZER_REGISTRY
from fairseq.models import FairseqEncoderDecoderModel, FairseqLanguageModel
from fairseq.models.bart import BARTHubInterface
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.registry import REGISTRIES
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from fairseq_tutel.moe.config import options_of
from fairseq_tutel.vision.images import UnreadableImageError, decoded, fitted, normalisation

ENCODERS = {"bpe": BPE_REGISTRY, "tokenizer": TOKENIZER_REGISTRY}


def _refused(method: str) -> Callable[..., Any]:
    """Return a method that says which others the model has."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{method} is not for {self.kind}; call {self.offers}.")

    return refuse


class Interface:
    """What every interface has: where it has no such method of fairseq's, a sentence.

    Attributes:
        kind: what the model is.
        offers: what it can be asked.
    """

    kind, offers = "", ""
    translate, sample, score = map(_refused, ("translate", "sample", "score"))
    fill_mask, classify = map(_refused, ("fill_mask", "classify"))


class Words:
    """Takes the place of bpe where there is none: text is words with spaces between."""

    def encode(self, text: str) -> str:
        """Return the text."""
        return text

    decode = encode


class Beams:
    """Goes before an interface of encoder-decoders: bart's attention keeps the largest beam that it saw."""

    models: Any

    def generate(self, tokens: Any, beam: int = 5, *args: Any, **kwargs: Any) -> Any:
        """Return fairseq's hypotheses of each sentence."""
        for model in self.models:
            if hasattr(model, "set_beam_size"):
                model.set_beam_size(beam)
        return super().generate(tokens, beam, *args, **kwargs)  # type: ignore[misc]


class Translation(Beams, hub_utils.GeneratorHubInterface, Interface):
    """An encoder-decoder: `translate`, of one sentence or several, and fairseq's `generate`."""

    kind, offers = "a translation model", "translate"
    score = Interface.score  # stock's knows no source


class LanguageModel(hub_utils.GeneratorHubInterface, Interface):
    """A decoder: `sample` goes on from a text, `score` gives the log-probabilities of one."""

    kind, offers = "a language model", "sample or score"
    translate = Interface.translate


class MaskedLanguageModel(RobertaHubInterface, Interface):
    """An encoder of tokens: `fill_mask`, `extract_features`, `predict` of a classification head."""

    kind, offers = "a masked language model", "fill_mask, extract_features or predict"
    bpe: Any

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, _only(models, self.kind))
        self.bpe = self.bpe or Words()

    def fill_mask(self, masked_input: str, topk: int = 5) -> Any:
        """Return the `topk` fillings of the text's one <mask>: (text, probability, what was filled in).

        Raises:
            ValueError: it has none, or several.
        """
        _refuse_masks(masked_input, masked_input.count("<mask>") == 1, "one <mask>")
        # Stock's own loses the special symbols among the best, and with them which probability is whose.
        dictionary = self.task.source_dictionary
        before, after = masked_input.split("<mask>")
        parts = (self.bpe.encode(part.strip()) for part in (before, after))
        line = f"<s> {' <mask> '.join(parts)} </s>"
        tokens = dictionary.encode_line(line, append_eos=False, add_if_not_exist=False).long()
        with torch.no_grad():
            logits_BLV, _ = self.model(tokens[None].to(self.device))
        place = int((tokens == self.task.mask_idx).nonzero())
        probabilities_V = logits_BLV[0, place].float().softmax(dim=0)
        special = {*range(dictionary.nspecial), self.task.mask_idx}
        ranked = [i for i in probabilities_V.argsort(descending=True).tolist() if i not in special]
        found = []
        for i in ranked[:topk]:
            text, begins = self._text_of(dictionary[i])
            left = before.rstrip() + " " if begins and before.strip() else before
            found.append((left + text + after, float(probabilities_V[i]), text))
        return found

    def _text_of(self, symbol: str) -> tuple[str, bool]:
        """Return what a symbol of the dictionary stands for, and whether a word begins with it."""
        text = self.bpe.decode(symbol)
        begins = isinstance(self.bpe, Words) or text[:1] == " " or symbol[:1] == "\u2581"
        return text.strip(), begins


class Denoising(Beams, BARTHubInterface, Interface):
    """An encoder-decoder that restores text: `fill_mask`, and fairseq's `sample` and `generate`."""

    kind, offers = "a denoising model", "fill_mask or sample"
    bpe: Any
    translate, score = Interface.translate, Interface.score

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, _only(models, self.kind))
        self.bpe = self.bpe or Words()

    def fill_mask(self, masked_inputs: Sequence[str], topk: int = 5, **options: Any) -> Any:
        """Return the `topk` restored texts of each with <mask> in it, or of the one: (text, score).

        Raises:
            ValueError: one has none.
        """
        if isinstance(masked_inputs, str):
            return self.fill_mask([masked_inputs], topk, **options)[0]
        for text in masked_inputs:
            _refuse_masks(text, "<mask>" in text, "a <mask>")
        return super().fill_mask(masked_inputs, topk, **options)


class ImageClassification(nn.Module, Interface):
    """A classifier of images, or an ensemble of them: `classify`."""

    kind, offers = "a classifier of images", "classify"

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cfg, self.task = cfg, task
        self.models: Any = nn.ModuleList(models)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.parameters()).device

    def classify(self, images: Any, topk: int = 1) -> Any:
        """Return the `topk` likeliest classes of each image, or of the one: (name, probability).

        Args:
            images: a file, or an array, uint8 [h, w] or [h, w, C]; or a sequence of these.
            topk: how many.

        Raises:
            ValueError: one cannot be read, or has other channels than the model.
        """
        if isinstance(images, str | Path) or getattr(images, "ndim", 0) == 2:
            return self.classify([images], topk)[0]
        names, like = self.task.class_names, next(self.parameters())
        found = []
        # One after the other: they may be of any size, and as many as there are.
        for image in images:
            x_1CHW = self._normalised(image)[None].to(like)
            with torch.no_grad():
                each = [m.get_normalized_probs(m(x_1CHW), log_probs=False)[0] for m in self.models]
            best = torch.stack(each).float().mean(0).topk(min(topk, len(names)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found.append([(names[i], probability) for i, probability in pairs])
        return found

    def _normalised(self, image: Any) -> torch.Tensor:
        channels, height, width = self.task.state.images["shape"]
        if isinstance(image, str | Path):
            try:
                pixels = decoded(str(image), channels)
            except UnreadableImageError as error:
                raise ValueError(f"{error}; give another file.") from error
        else:
            pixels = torch.as_tensor(image)
            pixels = (pixels[..., None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)
            if pixels.dtype != torch.uint8 or len(pixels) != channels:
                raise ValueError(
                    f"classify got an array of {pixels.dtype} with {len(pixels)} channels; give uint8 "
                    f"[height, width, {channels}]."
                )
        mean, std = normalisation(self.task.image_config, channels)
        return (fitted(pixels, height, width) - mean) / std


def _only(models: Sequence[nn.Module], kind: str) -> nn.Module:
    """Return the model of an interface of fairseq's that takes one, and would pass over others."""
    if len(models) > 1:
        raise ValueError(
            f"path names {len(models)} checkpoints, and {kind} cannot be an ensemble; give one of them."
        )
    return models[0]


def _refuse_masks(text: str, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise ValueError(f"fill_mask got {text!r}; give a text with {wanted} in it.")


def open_interface(
    files: Sequence[Path],
    data: Path,
    device: torch.device,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    known: Collection[str],
) -> Interface:
    """Open checkpoints, an ensemble if there are several, and return the interface for them.

    Args:
        files: absolute paths.
        data: the folder of the dictionaries.
        device: for the weights.
        dtype: of the weights.
        options: in place of what was saved.
        known: what was saved.

    Raises:
        ValueError: as of `hub.from_checkpoint`.
    """
    try:
        opened = hub_utils.from_pretrained(
            str(files[0].parent),
            os.pathsep.join(map(str, files)),
            str(data),
            cpu=device.type == "cpu",
            load_checkpoint_heads=True,  # of roberta and bart
            **options,
        )
        cfg, task, models = opened["args"], opened["task"], opened["models"]
        _refuse_unknown(options, known)
        for model in models:
            model.to(device=device, dtype=dtype)
        return interface_of(models[0], task)(cfg, task, models).to(device).eval()
    except Exception as error:
        sentence = _sentence(error, files, data)
        if sentence is None:
            raise
        raise sentence from error


def interface_of(model: nn.Module, task: Any) -> Any:
    """Return the class of the interface for a model of a task.

    Raises:
        ValueError: there is none.
    """
    # image_classification, whose folder stands below this one.
    if hasattr(type(task), "class_names"):
        return ImageClassification
    kinds = {
        RobertaModel: MaskedLanguageModel,
        FairseqLanguageModel: LanguageModel,
        FairseqEncoderDecoderModel: Denoising if hasattr(task, "mask_idx") else Translation,
    }
    for kind, interface in kinds.items() if _reads_text(task) else ():
        if isinstance(model, kind):
            return interface
    raise ValueError(
        f"path names a {type(model).__name__} of the task {type(task).__name__}, of which there is no "
        "interface; open it by fairseq's checkpoint_utils.load_model_ensemble_and_task."
    )


def _reads_text(task: Any) -> bool:
    """Whether a task has words to read; those of speech have none."""
    try:
        return task.source_dictionary is not None
    except NotImplementedError:
        return False


def _sentence(error: Exception, files: Sequence[Path], data: Path) -> ValueError | None:
    """Return what to say of an error that stock says otherwise; None of others."""
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename:
        return ValueError(
            f"{error.filename} does not exist, which the task of {files[0]} reads; give `data`, the "
            "folder with the dictionaries of the training."
        )
    if isinstance(error, OSError) and "Model file not found" in text:
        return ValueError(f"path names {text.rpartition(': ')[2]}, which does not exist.")
    if "infer language pair" in text:
        return ValueError(
            f"{data} does not tell the languages of {files[0]}; add source_lang=… and target_lang=…."
        )
    if isinstance(error, OmegaConfBaseException):
        reason = text.partition("\n")[0]
        return ValueError(f"{error.full_key or 'an option'}: {reason[:1].lower()}{reason[1:]}.")
    if isinstance(error, RuntimeError) and "size mismatch" in text:
        return ValueError(
            f"the weights of {files[0]} are not of the size that the dictionaries in {data} ask for; give "
            "`data`, the folder with those of the training."
        )
    return None


def _refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse an option that nothing knows, which stock would pass over."""
    known = {*known, *ENCODERS, "user_dir", "generation_args"}
    known |= {option.key for owner in ("task", "model") for option in options_of(owner)}
    for key, registry in ENCODERS.items():
        name = options.get(key)
        if name is not None and name not in registry:
            raise ValueError(f"{key} is {name}; give one of {', '.join(sorted(registry))}.")
        dataclass = REGISTRIES[key]["dataclass_registry"].get(name)
        known |= {field.name for field in fields(dataclass)} if dataclass else set()
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(
            f"{unknown[0]} is no option of this model, its task or a run; leave it out, or look for its "
            "name in docs/flags.md or fairseq's help, where it has dashes."
        )
