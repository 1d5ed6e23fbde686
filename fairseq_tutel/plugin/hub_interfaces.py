"""Python interfaces for trained models, one for each kind of model, based on fairseq's hub interfaces."""

import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import hub_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import FairseqEncoderDecoderModel, FairseqLanguageModel
from fairseq.models.bart import BARTHubInterface
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask
from fairseq_cli.generate import get_symbols_to_strip_from_output
from torch import nn

from fairseq_tutel.vision.images import decoded, fitted, normalized, tensor_of

# Options of fairseq-generate that have no effect in Python, or fail.
OF_COMMANDS = {"constraints", "lm_path", "lm_weight", "nbest", "prefix_size", "replace_unk", "sacrebleu"}
GENERATION = {
    *{field.name for field in fields(GenerationConfig)} - OF_COMMANDS,
    *("skip_invalid_size_inputs", "inference_step_args", "prefix_allowed_tokens_fn"),
}
# Tasks that can change their languages after they are set up.
MULTILINGUAL = (TranslationMultiSimpleEpochTask, TranslationFromPretrainedBARTTask)


class Interface:
    """Base class of all model interfaces; a lock allows one call at a time, as layers keep state.

    A subclass sets `kind`, its kind of model, and `offers`, its methods.
    """

    kind = ""
    offers: tuple[str, ...] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.RLock()


class Words:
    """Stands in for the BPE of a model without BPE: a text consists of words separated by spaces."""

    def encode(self, text: str) -> str:
        """Return the text unchanged."""
        return text

    decode = encode


class Single(Interface):
    """Base class of interfaces that accept one model; fairseq would silently ignore other models."""

    bpe: Any

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        if len(models) > 1:
            raise ValueError(
                f"path names {len(models)} checkpoints, but {self.kind} cannot be an ensemble; give one "
                "checkpoint."
            )
        super().__init__(cfg, task, models[0])
        self.bpe = self.bpe or Words()


class Generating(Interface):
    """Base class of interfaces that generate text: checks the options and sets the beam size."""

    models: Any

    def generate(
        self, tokens: Any, beam: int = 5, verbose: bool = False, *args: Any, **options: Any
    ) -> Any:
        """Generate with beam search; return fairseq's hypotheses for each sentence.

        Raises:
            ValueError: an option is unknown.
        """
        unknown = sorted(options.keys() - GENERATION)
        if unknown:
            raise ValueError(
                f"{unknown[0]} is not an option of generation in Python; remove it, or find the right name "
                "in fairseq-generate's help, where options have dashes."
            )
        if not len(tokens):
            return []
        with self.lock:
            for model in self.models:
                # BART's attention keeps the largest beam size so far.
                if hasattr(model, "set_beam_size"):
                    model.set_beam_size(beam)
            return super().generate(tokens, beam, verbose, *args, **options)  # type: ignore[misc]


class Translation(Generating, hub_utils.GeneratorHubInterface):
    """Interface of a translation model: `translate` for texts, and fairseq's `generate` for token ids."""

    kind = "a translation model"
    offers = ("translate",)

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__(cfg, task, models)
        self._stripped: dict[str | None, set[int]] = {}  # target language -> its tokens in outputs
        if isinstance(task, TranslationFromPretrainedBARTTask):
            task.args = task.cfg  # fairseq's task reads this attribute, but does not set it

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

        `source_lang` and `target_lang` select the languages of a multilingual model. Later calls without
        these arguments use the same languages.

        Raises:
            ValueError: a language is missing or unknown.
        """
        with self.lock:
            self._set_languages({"source_lang": source_lang, "target_lang": target_lang})
            if isinstance(sentences, str):
                return self.translate([sentences], beam, verbose, **options)[0]
            return hub_utils.GeneratorHubInterface.sample(self, sentences, beam, verbose, **options)

    def score(self, *args: Any, **options: Any) -> Any:
        """Raise an error: fairseq's method would ignore the source."""
        raise ValueError(f"{self.kind} has no method score; call translate.")

    def _set_languages(self, given: dict[str, str | None]) -> None:
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
            shared = next(iter(self.task.dicts.values()))  # this task requires equal dictionaries
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


class LanguageModel(Generating, hub_utils.GeneratorHubInterface):
    """Interface of a language model: `sample` continues a text, `score` returns log-probabilities."""

    kind, offers = "a language model", ("sample", "score")


class MaskedLanguageModel(Single, RobertaHubInterface):
    """Interface of a masked language model, with `fill_mask`, `extract_features` and `predict`."""

    kind, offers = "a masked language model", ("fill_mask", "extract_features", "predict")

    def fill_mask(self, masked_input: str, topk: int = 5) -> Any:
        """Return the `topk` most probable words for the <mask> in a text: (filled text, probability, word).

        Raises:
            ValueError: the text has no <mask> or several.
        """
        _refuse_masks(masked_input, masked_input.count("<mask>") == 1, "one <mask>")
        # fairseq's method drops special symbols, and then assigns probabilities to the wrong words.
        dictionary = self.task.source_dictionary
        before, after = masked_input.split("<mask>")
        parts = (self.bpe.encode(part.rstrip()) for part in (before, after))
        line = f"<s> {' <mask> '.join(parts)} </s>"
        tokens = dictionary.encode_line(line, append_eos=False, add_if_not_exist=False).long()
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
        """Return the features of tokens, as fairseq's `extract_features` does."""
        with self.lock:
            return super().extract_features(*args, **kwargs)

    def _text_of(self, symbol: str) -> tuple[str, bool]:
        """Return the text of a dictionary symbol, and whether the symbol begins a word."""
        text = self.bpe.decode(symbol)
        begins = isinstance(self.bpe, Words) or text[:1] == " " or symbol[:1] == "\u2581"
        return text.strip(), begins


class Denoising(Single, Generating, BARTHubInterface):
    """Interface of a denoising model such as BART, with `fill_mask`, `sample` and `generate`."""

    kind, offers = "a denoising model", ("fill_mask", "sample")

    def generate(self, tokens: Any, *args: Any, **options: Any) -> Any:
        """Generate with beam search, in batches of equally long texts.

        Padding is avoided because fairseq would treat it as text.
        """
        if torch.is_tensor(tokens) and tokens.dim() == 1:
            return self.generate([tokens], *args, **options)[0]
        found: dict[int, Any] = {}
        for length in {len(each) for each in tokens}:
            places = [i for i, each in enumerate(tokens) if len(each) == length]
            some = super().generate([tokens[i] for i in places], *args, **options)
            found |= zip(places, some, strict=False)  # fairseq skips all texts of a length, or none
        return [found[i] for i in sorted(found)]

    def fill_mask(self, masked_inputs: Sequence[str], topk: int = 5, **options: Any) -> Any:
        """Return the `topk` best completions of each text with <mask>, as pairs (text, score).

        Raises:
            ValueError: an input has no <mask>.
        """
        if isinstance(masked_inputs, str):
            return self.fill_mask([masked_inputs], topk, **options)[0]
        for text in masked_inputs:
            _refuse_masks(text, "<mask>" in text, "a <mask>")
        return super().fill_mask(masked_inputs, topk, **options)


class TextClassification(Single, BARTHubInterface):
    """Interface of an encoder-decoder that classifies texts: `predict(head, encode(text))`."""

    kind, offers = "a text classifier", ("predict",)


class ImageClassification(Interface, nn.Module):
    """Interface of an image classifier, or of an ensemble of image classifiers."""

    kind, offers = "an image classifier", ("classify",)

    def __init__(self, cfg: Any, task: Any, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cfg, self.task = cfg, task
        self.models: Any = nn.ModuleList(models)

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next(self.parameters()).device

    def classify(self, images: Any, topk: int = 1) -> Any:
        """Return the `topk` most probable classes of each image, as pairs (name, probability).

        Args:
            images: a file or a uint8 array [h, w] or [h, w, C], or a sequence of files and arrays.
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
        # Images are classified one at a time, because their sizes and their number vary.
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


def _refuse_masks(text: str, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise ValueError(f"fill_mask got {text!r}; give a text with {wanted} in it.")


class NoInterfaceError(ValueError):
    """No interface supports a model, such as a model of speech."""


def interface_of(model: nn.Module, task: Any) -> Any:
    """Return the interface class for a model and its task.

    Raises:
        NoInterfaceError: no interface supports the model.
    """
    # Only the task image_classification has class names; this folder cannot import the task.
    if hasattr(type(task), "class_names"):
        return ImageClassification
    kinds = {
        RobertaModel: MaskedLanguageModel,
        FairseqLanguageModel: LanguageModel,
        FairseqEncoderDecoderModel: Denoising if hasattr(task, "mask_idx") else Translation,
    }
    if isinstance(task, SentencePredictionTask):
        kinds[FairseqEncoderDecoderModel] = TextClassification
    for kind, interface in kinds.items() if reads_text(task) else ():
        if isinstance(model, kind):
            return interface
    raise NoInterfaceError(
        f"path names a {type(model).__name__} of the task {type(task).__name__}, for which there is no "
        "interface; open it with fairseq's checkpoint_utils.load_model_ensemble_and_task."
    )


def reads_text(task: Any) -> bool:
    """Return whether a task has text input, unlike speech tasks."""
    try:
        return task.source_dictionary is not None
    except NotImplementedError:
        return False
