"""A moe_ twin of every stock model with a stack of fairseq's transformer layers; docs/models.md lists them.

As the stock ones, most are registered without a dataclass: fairseq-train cannot build a nested one.
"""

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.bart import BARTModel
from fairseq.models.hubert import HubertCtc, HubertModel, HubertSeq2SeqModel
from fairseq.models.lightconv import LightConvModel
from fairseq.models.lightconv_lm import LightConvLanguageModel
from fairseq.models.masked_lm import MaskedLMModel
from fairseq.models.multilingual_transformer import MultilingualTransformerModel
from fairseq.models.roberta import RobertaEncDecModel, RobertaModel
from fairseq.models.speech_dlm import SpeechDLM
from fairseq.models.speech_to_speech.s2s_conformer import S2SpecTConformerModel, S2UTConformerModel
from fairseq.models.speech_to_speech.s2s_transformer import S2STransformerMultitaskModelBase
from fairseq.models.speech_to_text import ConvTransformerModel, S2TTransformerModel
from fairseq.models.speech_to_text.s2t_conformer import S2TConformerModel
from fairseq.models.text_to_speech import TTSTransformerModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_ulm import TransformerUnitLanguageModel
from fairseq.models.wav2vec import Wav2Vec2Model, Wav2Vec2Seq2SeqModel, Wav2VecCtc
from fairseq.models.wav2vec.wav2vec2_classification import Wav2VecClassification
from omegaconf import open_dict

from fairseq_tutel.plugin import twin_of
from fairseq_tutel.plugin.feed_forward import moe_layers, watch_padding
from fairseq_tutel.plugin.install import MoEModelMixin, install_experts, refuse_options
from fairseq_tutel.plugin.registration.flags import (
    EncoderDecoderOptions,
    ModelOptions,
    defaults,
    fill_in,
)
from fairseq_tutel.plugin.training.checks import is_opened, root_of
from fairseq_tutel.plugin.training.task import attach

BOTH = ("encoder", "decoder")
# What of a model has layers with an fc1: of a stock class and those that are made of it.
SIDES = {
    RobertaModel: ("encoder",),
    MaskedLMModel: ("encoder",),
    Wav2Vec2Model: ("encoder",),
    HubertModel: ("encoder",),
    LightConvLanguageModel: ("decoder",),
    TransformerUnitLanguageModel: ("decoder",),
    SpeechDLM: ("decoder",),
    TransformerModel: BOTH,
    MultilingualTransformerModel: BOTH,
    RobertaEncDecModel: BOTH,
    LightConvModel: BOTH,
    S2TTransformerModel: BOTH,
    ConvTransformerModel: BOTH,
    TTSTransformerModel: BOTH,
    S2STransformerMultitaskModelBase: BOTH,
    # A conformer's layers have two FFNs, of other names.
    S2TConformerModel: ("decoder",),
    S2UTConformerModel: ("decoder",),
    S2SpecTConformerModel: ("decoder",),
}
# Built around a model that --w2v-path names.
FINE_TUNED = (
    Wav2VecCtc,
    Wav2Vec2Seq2SeqModel,
    Wav2VecClassification,
    HubertCtc,
    HubertSeq2SeqModel,
)
# Sides whose linear layers fairseq's init_bert_params sets, and what it does to them; others are asked to.
BERT_SIDES = {
    RobertaModel: {"encoder"},
    RobertaEncDecModel: {"encoder"},
    BARTModel: {"encoder", "decoder"},
    Wav2Vec2Model: {"encoder"},
    HubertModel: {"encoder"},
}
BERT_INIT = {"init_std": 0.02}
# Why they have none: docs/models.md.
WITHOUT_TWIN = ("nacrf_transformer", "unity_conformer", "s2spect2_conformer")

# Whether the model that is being built is the pretrained one within another.
_is_within: ContextVar[bool] = ContextVar("_is_within", default=False)


class MoETwinMixin(MoEModelMixin):
    """Goes before a stock model: experts in the FFNs of its encoder, its decoder, or both."""

    sides: ClassVar[tuple[str, ...]] = BOTH

    @classmethod
    def options(cls) -> type:
        """Return the dataclass of the experts' options."""
        return EncoderDecoderOptions if len(cls.sides) > 1 else ModelOptions

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags and the experts'; the architecture fills in what is not given."""
        super().add_args(parser)
        if getattr(cls, "__dataclass", None) is None:
            gen_parser_from_dataclass(parser, cls.options()(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Build the stock model, then replace the chosen FFNs."""
        fill_in(args, cls.options())
        refuse_options(args)
        model = super().build_model(args, task)  # type: ignore[misc]
        model.__class__ = cls  # some name their own
        own = {side: getattr(args, f"{side}_moe_freq", -1) for side in cls.sides}
        freqs = {side: args.moe_freq if freq == -1 else freq for side, freq in own.items()}
        bert = [sides for stock, sides in BERT_SIDES.items() if issubclass(cls, stock)]
        asked = cls.sides if getattr(args, "apply_bert_init", False) else ()
        of_sides = dict.fromkeys(set().union(asked, *bert), BERT_INIT)
        if _is_within.get():  # the run's options are those of the other's task
            install_experts(model, args, None, freqs, of_sides)
            return model
        if is_opened(args):
            _refuse_within_a_dense_model(root_of(None))
        install_experts(model, args, task, freqs, of_sides)
        if issubclass(cls, LightConvModel | LightConvLanguageModel):
            watch_padding(model.decoder)
        attach(task, model)
        return model


class FineTunedMixin(MoEModelMixin):
    """Goes before a stock model that is built around a pretrained one, whose experts it goes on with.

    The inner model is built with all experts on every rank and takes its weights; then they are shared out
    as the training at hand says.
    """

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> Any:
        """Build the stock model around the pretrained one.

        Raises:
            ValueError: that one has no experts.
        """
        with open_dict(cfg):
            cfg.setdefault("autoregressive", False)  # which stock's hubert_ctc reads and lacks
        token = _is_within.set(True)
        try:
            model = super().build_model(cfg, task)  # type: ignore[misc]
        finally:
            _is_within.reset(token)
        model.__class__ = cls
        if not moe_layers(model):
            stock = cfg._name.removeprefix("moe_")
            raise ValueError(
                f"--w2v-path is {cfg.w2v_path}, whose model has no experts for --arch {cfg._name} to go on "
                f"with; give what `python -m fairseq_tutel convert upcycle` makes of it, or --arch {stock}."
            )
        with open_dict(cfg):
            for key in defaults(ModelOptions):
                cfg[key] = cfg.w2v_args.model[key]
        install_experts(model, cfg, task, {"encoder": cfg.moe_freq, "decoder": 0})
        attach(task, model)
        return model


def _refuse_within_a_dense_model(root: Any) -> None:
    """Refuse a training of a stock model around one with experts: nobody would share these out."""
    model: Any = getattr(root, "model", None)
    if not getattr(model, "w2v_path", None):
        return
    if not getattr(ARCH_MODEL_REGISTRY.get(model._name), "has_experts", False):
        raise ValueError(
            f"--arch {model._name} is dense, and --w2v-path {model.w2v_path} has experts; choose --arch "
            f"moe_{model._name}."
        )


def moe_architecture(stock: Callable[[Any], None], options: type) -> Callable[[Any], None]:
    """Return an architecture function: the stock one, and the experts' options by default."""

    def architecture(args: Any) -> None:
        fill_in(args, options)
        stock(args)

    return architecture


def register_architectures(model: str, options: type) -> None:
    """Register a moe_ twin of every architecture that stock fairseq has for `model`."""
    for arch in list(ARCH_MODEL_INV_REGISTRY[model]):
        if f"moe_{arch}" in ARCH_CONFIG_REGISTRY:
            continue
        stock = ARCH_CONFIG_REGISTRY[arch]
        register_model_architecture(f"moe_{model}", f"moe_{arch}")(moe_architecture(stock, options))


def _sides_of(stock: type) -> tuple[str, ...] | None:
    """Return what of a stock model can have experts; None: nothing."""
    return next((SIDES[base] for base in stock.__mro__ if base in SIDES), None)


def _register_twins() -> None:
    for name, stock in list(MODEL_REGISTRY.items()):
        sides = _sides_of(stock)
        if (
            not (sides or issubclass(stock, FINE_TUNED))
            or issubclass(stock, MoEModelMixin)
            or not stock.__module__.startswith("fairseq.models.")
            or name in WITHOUT_TWIN
            or name not in ARCH_MODEL_INV_REGISTRY
        ):
            continue
        dataclass = MODEL_DATACLASS_REGISTRY.get(name)
        if sides is None:
            twin: Any = twin_of(stock, FineTunedMixin, module=__name__)
            register_model(f"moe_{name}", dataclass=dataclass)(twin)
            continue
        twin = twin_of(stock, MoETwinMixin, module=__name__, sides=sides)
        if dataclass is not None:
            dataclass = dataclasses.make_dataclass(
                f"MoE{dataclass.__name__}", [], bases=(twin.options(), dataclass)
            )
        register_model(f"moe_{name}", dataclass=dataclass)(twin)
        register_architectures(name, twin.options())


_register_twins()
