"""Registers a moe_ variant of every fairseq model with transformer layers; docs/models.md lists them.

Most variants, like their stock models, have no dataclass, because fairseq-train cannot build nested ones.
"""

import argparse
import dataclasses
import logging
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
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
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.models.transformer_ulm import TransformerUnitLanguageModel
from fairseq.models.wav2vec import Wav2Vec2Model, Wav2Vec2Seq2SeqModel, Wav2VecCtc
from fairseq.models.wav2vec.wav2vec2_classification import Wav2VecClassification
from omegaconf import OmegaConf, open_dict

from fairseq_tutel.plugin.feed_forward import moe_layers, watch_padding
from fairseq_tutel.plugin.install import MoEModelMixin, install_experts, refuse_options
from fairseq_tutel.plugin.opening.offload import for_loading
from fairseq_tutel.plugin.registration.flags import EncoderDecoderOptions, ModelOptions, defaults, fill_in
from fairseq_tutel.plugin.registration.variants import change_class, variant_of
from fairseq_tutel.plugin.run_state import is_opened, root_of

logger = logging.getLogger(__name__)

BOTH = ("encoder", "decoder")
# The sides (encoder, decoder or both) on which the layers of each model class have fc1.
SIDES = (
    (("encoder",), (RobertaModel, MaskedLMModel, Wav2Vec2Model, HubertModel)),
    (("decoder",), (TransformerLanguageModel, LightConvLanguageModel, TransformerUnitLanguageModel)),
    (("decoder",), (SpeechDLM,)),
    # Only the decoder: Conformer layers of the encoder have two FFNs with different names.
    (("decoder",), (S2TConformerModel, S2UTConformerModel, S2SpecTConformerModel)),
    (BOTH, (TransformerModel, MultilingualTransformerModel, RobertaEncDecModel, LightConvModel)),
    (BOTH, (S2TTransformerModel, ConvTransformerModel, TTSTransformerModel)),
    (BOTH, (S2STransformerMultitaskModelBase,)),
)
# fairseq models that contain the pretrained model of --w2v-path.
FINE_TUNED = (Wav2VecCtc, Wav2Vec2Seq2SeqModel, Wav2VecClassification, HubertCtc, HubertSeq2SeqModel)
# In these models, fairseq always initializes linear layers of the given sides with init_bert_params.
BERT_SIDES = {
    **dict.fromkeys((RobertaModel, RobertaEncDecModel, Wav2Vec2Model, HubertModel), ("encoder",)),
    BARTModel: BOTH,
}
BERT_INIT = {"init_std": 0.02}
# fairseq models without a MoE variant; docs/models.md gives the reasons.
WITHOUT_VARIANT = ("nacrf_transformer", "unity_conformer", "s2spect2_conformer")

# Whether the model that is being built is a pretrained model inside another model.
_is_within: ContextVar[bool] = ContextVar("_is_within", default=False)


class MoEVariantMixin(MoEModelMixin):
    """Mixin for a fairseq model class that adds experts to the encoder, the decoder, or both."""

    sides: ClassVar[tuple[str, ...]] = BOTH

    @classmethod
    def options(cls) -> type:
        """Return the dataclass with the MoE options of a model class."""
        return EncoderDecoderOptions if len(cls.sides) > 1 else ModelOptions

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock model's flags and the MoE flags; the architecture sets their defaults."""
        super().add_args(parser)
        if getattr(cls, "__dataclass", None) is None:
            gen_parser_from_dataclass(parser, cls.options()(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Build the stock model, then replace the FFNs of the chosen layers by experts."""
        _fill_in(args, cls)
        refuse_options(args)
        with for_loading(args, task):
            model = super().build_model(_with_scales(args), task)  # type: ignore[misc]
        change_class(model, cls)  # In some fairseq models, build_model ignores its argument cls.
        own = {side: getattr(args, f"{side}_moe_freq", -1) for side in cls.sides}
        freqs = {side: args.moe_freq if freq == -1 else freq for side, freq in own.items()}
        bert = [sides for stock, sides in BERT_SIDES.items() if issubclass(cls, stock)]
        given = cls.sides if getattr(args, "apply_bert_init", False) else ()
        of_sides = dict.fromkeys(set().union(given, *bert), BERT_INIT)
        if _is_within.get():  # Only the outer model gets the task.
            install_experts(model, args, None, freqs, of_sides)
            return model
        if is_opened(args):
            _refuse_within_a_dense_model(root_of(None))
        install_experts(model, args, task, freqs, of_sides)
        if issubclass(cls, LightConvModel | LightConvLanguageModel):
            watch_padding(model.decoder)
        return model


class FineTunedMixin(MoEModelMixin):
    """Mixin for a fairseq model class that fine-tunes a pretrained inner model with experts.

    The inner model is first built with all experts on every rank, and loads its pretrained weights. The
    inner model's experts are then distributed over the ranks of the run.
    """

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> Any:
        """Build the stock model with the pretrained model inside, then distribute the inner experts."""
        with open_dict(cfg):
            cfg.setdefault("autoregressive", False)  # hubert_ctc reads this option, but does not define it.
        token = _is_within.set(True)
        try:
            model = super().build_model(cfg, task)  # type: ignore[misc]
        finally:
            _is_within.reset(token)
        change_class(model, cls)
        if not moe_layers(model):
            stock = cfg._name.removeprefix("moe_")
            raise ValueError(
                f"--w2v-path is {cfg.w2v_path}, which has no experts, but --arch {cfg._name} needs them; "
                f"give the output of `fairseq-tutel convert upcycle`, or --arch {stock}."
            )
        with open_dict(cfg):
            for key in defaults(ModelOptions):
                cfg[key] = cfg.w2v_args.model[key]
        install_experts(model, cfg, task, {"encoder": cfg.moe_freq, "decoder": 0})
        return model


def _refuse_within_a_dense_model(root: Any) -> None:
    """Raise an error if a pretrained model with experts is fine-tuned with a dense --arch."""
    model: Any = getattr(root, "model", None)
    has_experts = getattr(ARCH_MODEL_REGISTRY.get(getattr(model, "_name", "")), "has_experts", False)
    if getattr(model, "w2v_path", None) and not has_experts:
        raise ValueError(
            f"--arch {model._name} is dense, but --w2v-path {model.w2v_path} has experts; give --arch "
            f"moe_{model._name}."
        )


def _fill_in(args: Any, cls: Any) -> None:
    """Set the options that a model's configuration lacks to their defaults, in place.

    hydra does not merge a model's dataclass if the configuration names an architecture.
    """
    if not OmegaConf.is_config(args):
        fill_in(args, cls.options())
        return
    with open_dict(args):
        for key, default in defaults(getattr(cls, "__dataclass", None) or cls.options()).items():
            if key not in args and default is not dataclasses.MISSING and str(default)[:2] != "${":
                args[key] = default


def _with_scales(args: Any) -> Any:
    """Return the model options as a Namespace if --scale-fc or a similar option is set.

    fairseq's TransformerConfig reads --scale-fc and similar options only from a Namespace.
    """
    scales = ("scale_fc", "scale_attn", "scale_heads", "scale_resids")
    if not OmegaConf.is_config(args) or not any(args.get(key) for key in scales):
        return args
    plain: Any = OmegaConf.to_container(args, resolve=True)
    return argparse.Namespace(**plain)


def _architecture(stock: Callable[[Any], None], options: type, args: Any) -> None:
    """Set missing MoE options, and missing options of fairseq's architecture, to their defaults."""
    fill_in(args, options)
    stock(args)


def _register_architectures(model: str, options: type) -> None:
    """Register a moe_ variant of every architecture that fairseq defines for `model`."""
    for arch in list(ARCH_MODEL_INV_REGISTRY[model]):
        if f"moe_{arch}" not in ARCH_CONFIG_REGISTRY:
            architecture = partial(_architecture, ARCH_CONFIG_REGISTRY[arch], options)
            register_model_architecture(f"moe_{model}", f"moe_{arch}")(architecture)


def _register_variants() -> None:
    for name, stock in list(MODEL_REGISTRY.items()):
        found = (sides for base in stock.__mro__ for sides, models in SIDES if base in models)
        sides = next(found, None)
        if (
            not (sides or issubclass(stock, FINE_TUNED))
            or issubclass(stock, MoEModelMixin)
            or not stock.__module__.startswith("fairseq.models.")
            or name in WITHOUT_VARIANT
            or name not in ARCH_MODEL_INV_REGISTRY
        ):
            continue
        dataclass = MODEL_DATACLASS_REGISTRY.get(name)
        if sides is None:
            variant: Any = variant_of(stock, FineTunedMixin, module=__name__)
            register_model(f"moe_{name}", dataclass=dataclass)(variant)
            continue
        variant = variant_of(stock, MoEVariantMixin, module=__name__, sides=sides)
        if dataclass is not None:
            dataclass = dataclasses.make_dataclass(
                f"MoE{dataclass.__name__}", [], bases=(variant.options(), dataclass)
            )
        register_model(f"moe_{name}", dataclass=dataclass)(variant)
        _register_architectures(name, variant.options())


_register_variants()
