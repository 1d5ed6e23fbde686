"""Interfaces for models in Python, based on fairseq's hub interfaces, one for each kind of model."""

import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from fairseq import hub_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import FairseqEncoderDecoderModel, FairseqLanguageModel
from fairseq.models.bart import BARTHubInterface
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq_cli.generate import get_symbols_to_strip_from_output
from torch import nn

from fairseq_tutel.vision.images import UnreadableImageError, decoded, fitted, normalisation

GENERATION = {
    *(field.name for field in fields(GenerationConfig)),
    *("skip_invalid_size_inputs", "inference_step_args", "prefix_allowed_tokens_fn"),
}
TOO_LONG = re.compile(r"Size of sample #(\d+) is invalid \(=\(?(\d+).*max_positions=\(?(\d+)")


def _refused(method: str) -> Callable[..., Any]:
    """Return a method whose error names the methods that the model has."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{self.kind} has no {method}; call {self.offers}.")

    return refuse


class Interface:
    """Base class of all interfaces: methods of other kinds of models raise an error.

    Attributes:
        kind: the kind of model.
        offers: its methods.
    """

    kind, offers = "", ""
    translate, sample, score = map(_refused, ("translate", "sample", "score"))
    fill_mask, classify = map(_refused, ("fill_mask", "classify"))


class Words:
    """Replaces bpe in models without one: text is words separated by spaces."""

    def encode(self, text: str) -> str:
        """Return the text."""
        return text

    decode = encode


class Locked:
    """Mixin with a lock for several threads, since an expert store and some gates keep state of a call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.RLock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copy and pickle, which fail in fairseq's models."""
        raise TypeError("this model cannot be copied or pickled; open its checkpoint again.")


class Generating(Locked):
    """Mixin of interfaces that generate: checks arguments."""

    models: Any

    def sample(self, sentences: Any, *args: Any, **options: Any) -> Any:
        """Check the arguments and call fairseq's method."""
        return super().sample(_texts("sentences", sentences), *args, **options)  # type: ignore[misc]

    def score(self, sentences: Any, *args: Any, **options: Any) -> Any:
        """Check the arguments and call fairseq's method."""
        return super().score(_texts("sentences", sentences), *args, **options)  # type: ignore[misc]

    def generate(
        self, tokens: Any, beam: int = 5, verbose: bool = False, *args: Any, **options: Any
    ) -> Any:
        """Return fairseq's hypotheses of each sentence.

        Raises:
            ValueError: an option is unknown, the beam is invalid, or a sentence is too long.
        """
        unknown = sorted(options.keys() - GENERATION)
        if unknown:
            raise ValueError(
                f"{unknown[0]} is no option of generation; leave it out, or find its name in "
                "fairseq-generate's help, where it has dashes."
            )
        if not isinstance(beam, int) or beam < 1:
            raise ValueError(f"beam is {beam!r}; give a number of at least 1.")
        if not len(tokens):
            return []
        with self.lock:
            for model in self.models:
                # bart's attention keeps the largest beam so far.
                if hasattr(model, "set_beam_size"):
                    model.set_beam_size(beam)
            try:
                return super().generate(tokens, beam, verbose, *args, **options)  # type: ignore[misc]
            except Exception as error:  # fairseq raises a plain Exception
                found = TOO_LONG.match(str(error))
                if found is None:
                    raise
                raise ValueError(
                    f"sentence {found[1]} has {found[2]} tokens, and the model takes {found[3]}; give a "
                    "shorter one, or skip_invalid_size_inputs=True, which leaves it out of the results."
                ) from error


class Translation(Generating, hub_utils.GeneratorHubInterface, Interface):
    """An encoder-decoder with `translate`, for one sentence or several, and fairseq's `generate`."""

    kind, offers = "a translation model", "translate"
    score = Interface.score  # fairseq's ignores the source
    sample = Interface.sample  # fairseq's translates

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, models)
        generator = task.build_generator(self.models, cfg.generation)
        self._stripped = get_symbols_to_strip_from_output(generator)  # a language's token

    def translate(self, sentences: Any, beam: int = 5, verbose: bool = False, **options: Any) -> Any:
        """Return the translation of one sentence or of each; `options` are those of `generate`."""
        if isinstance(sentences, str):
            return self.translate([sentences], beam, verbose, **options)[0]
        texts = _texts("sentences", sentences)
        return hub_utils.GeneratorHubInterface.sample(self, texts, beam, verbose, **options)

    def string(self, tokens: torch.Tensor) -> str:
        """Return tokens as text, as fairseq-generate prints them."""
        return self.tgt_dict.string(tokens, extra_symbols_to_ignore=self._stripped)


class LanguageModel(Generating, hub_utils.GeneratorHubInterface, Interface):
    """A decoder: `sample` continues a text, `score` returns its log-probabilities."""

    kind, offers = "a language model", "sample or score"
    translate = Interface.translate


class MaskedLanguageModel(Locked, RobertaHubInterface, Interface):
    """An encoder with `fill_mask`, `extract_features`, and `predict` for classification heads."""

    kind, offers = "a masked language model", "fill_mask, extract_features or predict"
    bpe: Any

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, _only(models, self.kind))
        self.bpe = self.bpe or Words()

    def fill_mask(self, masked_input: str, topk: int = 5) -> Any:
        """Return the `topk` best words for the text's <mask>: (text, probability, word).

        Raises:
            ValueError: the text has no <mask> or several, or is too long.
        """
        if not isinstance(masked_input, str):
            raise ValueError(f"masked_input is {reprlib.repr(masked_input)}; give a text.")
        _refuse_masks(masked_input, masked_input.count("<mask>") == 1, "one <mask>")
        # fairseq's method drops special symbols, and then assigns probabilities to the wrong words.
        dictionary = self.task.source_dictionary
        before, after = masked_input.split("<mask>")
        parts = (self.bpe.encode(part.strip()) for part in (before, after))
        line = f"<s> {' <mask> '.join(parts)} </s>"
        tokens = dictionary.encode_line(line, append_eos=False, add_if_not_exist=False).long()
        if len(tokens) > self.model.max_positions():
            raise ValueError(
                f"fill_mask got a text of {len(tokens)} tokens, and the model takes "
                f"{self.model.max_positions()}; give a shorter one."
            )
        with torch.no_grad(), self.lock:
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

    def extract_features(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments and call fairseq's method."""
        with self.lock:
            return super().extract_features(*args, **kwargs)

    def _text_of(self, symbol: str) -> tuple[str, bool]:
        """Return the text of a dictionary symbol, and whether it is the start of a word."""
        text = self.bpe.decode(symbol)
        begins = isinstance(self.bpe, Words) or text[:1] == " " or symbol[:1] == "\u2581"
        return text.strip(), begins


class Denoising(Generating, BARTHubInterface, Interface):
    """An encoder-decoder that restores text, with `fill_mask`, and fairseq's `sample` and `generate`."""

    kind, offers = "a denoising model", "fill_mask or sample"
    bpe: Any
    translate, score = Interface.translate, Interface.score

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, _only(models, self.kind))
        self.bpe = self.bpe or Words()

    def generate(self, tokens: Any, *args: Any, **options: Any) -> Any:
        """Return fairseq's hypotheses, in batches of one length, since fairseq treats padding as text."""
        if torch.is_tensor(tokens) and tokens.dim() == 1:
            return self.generate([tokens], *args, **options)[0]
        found: dict[int, Any] = {}
        for length in {len(each) for each in tokens}:
            places = [i for i, each in enumerate(tokens) if len(each) == length]
            some = super().generate([tokens[i] for i in places], *args, **options)
            found |= zip(places, some, strict=False)  # a length is skipped as a whole
        return [found[i] for i in sorted(found)]

    def fill_mask(self, masked_inputs: Sequence[str], topk: int = 5, **options: Any) -> Any:
        """Return the `topk` restored texts, (text, score), of one text with <mask> or of each.

        Raises:
            ValueError: an input has no <mask>, or is no text.
        """
        if isinstance(masked_inputs, str):
            return self.fill_mask([masked_inputs], topk, **options)[0]
        masked_inputs = _texts("masked_inputs", masked_inputs)
        for text in masked_inputs:
            _refuse_masks(text, "<mask>" in text, "a <mask>")
        return super().fill_mask(masked_inputs, topk, **options)


class ImageClassification(Locked, nn.Module, Interface):
    """An image classifier, or an ensemble of them, with `classify`."""

    kind, offers = "an image classifier", "classify"

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cfg, self.task = cfg, task
        self.models: Any = nn.ModuleList(models)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.parameters()).device

    def classify(self, images: Any, topk: int = 1) -> Any:
        """Return the `topk` most probable classes, (name, probability), of one image or of each.

        Args:
            images: a file, or an array, uint8 [h, w] or [h, w, C]; or a sequence of these.
            topk: number of classes.

        Raises:
            ValueError: an image cannot be read, or has other channels than the model.
        """
        shape = tuple(getattr(images, "shape", ()))
        is_image = len(shape) == 2 or (len(shape) == 3 and shape[2] == self.task.channels)
        if is_image or isinstance(images, str | Path) or not isinstance(images, Iterable):
            return self.classify([images], topk)[0]
        names, like = self.task.class_names, next(self.parameters())
        found = []
        # One at a time, since sizes and the number of images vary.
        for image in images:
            x_1CHW = self._normalised(image)[None].to(like)
            with torch.no_grad(), self.lock:
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
            shape = tuple(getattr(image, "shape", ()))
            if len(shape) not in (2, 3):
                raise ValueError(
                    f"images has {reprlib.repr(image)}; give a file, or an array of uint8 "
                    f"[height, width, {channels}]."
                )
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
    """Return the only model; fairseq's interface would ignore others."""
    if len(models) > 1:
        raise ValueError(
            f"path names {len(models)} checkpoints, and {kind} cannot be an ensemble; give one of them."
        )
    return models[0]


def _texts(argument: str, given: Any) -> Any:
    """Return one text unchanged, or several as a list.

    Raises:
        ValueError: an item is no text.
    """
    if isinstance(given, str):
        return given
    texts = list(given) if isinstance(given, Iterable) else [given]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{argument} has {reprlib.repr(text)}; give a text, or a list of texts.")
    return texts


def _refuse_masks(text: str, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise ValueError(f"fill_mask got {text!r}; give a text with {wanted} in it.")


def interface_of(model: nn.Module, task: Any) -> Any:
    """Return the interface class for a model of a task.

    Raises:
        ValueError: there is none.
    """
    # The task image_classification, which this folder cannot import.
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
        f"path names a {type(model).__name__} of the task {type(task).__name__}, which have no "
        "interface; open it with fairseq's checkpoint_utils.load_model_ensemble_and_task."
    )


def _reads_text(task: Any) -> bool:
    """Whether a task has text input; speech tasks do not."""
    try:
        return task.source_dictionary is not None
    except NotImplementedError:
        return False
