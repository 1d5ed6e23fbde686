"""A moe_ twin of every stock model whose encoder or decoder is a stack of fairseq's transformer layers.

As the stock ones, they are registered without a dataclass: fairseq-train cannot build a nested one.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    MODEL_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.bart import BARTModel
from fairseq.models.masked_lm import MaskedLMModel
from fairseq.models.roberta import RobertaEncDecModel, RobertaModel
from fairseq.models.speech_to_speech.s2s_transformer import S2STransformerMultitaskModelBase
from fairseq.models.speech_to_text import ConvTransformerModel, S2TTransformerModel
from fairseq.models.text_to_speech import TTSTransformerModel
from fairseq.models.transformer import TransformerModel

from fairseq_tutel.plugin import twin_of
from fairseq_tutel.plugin.flags import EncoderDecoderOptions, ModelOptions, fill_in
from fairseq_tutel.plugin.install import MoEModelMixin, install_experts, refuse_options
from fairseq_tutel.plugin.task import attach

ENCODERS = (RobertaModel, MaskedLMModel)
ENCODER_DECODERS = (
    TransformerModel,
    RobertaEncDecModel,
    S2TTransformerModel,
    ConvTransformerModel,
    TTSTransformerModel,
    S2STransformerMultitaskModelBase,
)
# Sides whose linear layers fairseq's init_bert_params sets, and what it does to them; others are asked to.
BERT_SIDES = {
    RobertaModel: {"encoder"},
    RobertaEncDecModel: {"encoder"},
    BARTModel: {"encoder", "decoder"},
}
BERT_INIT = {"init_std": 0.02}
# A conformer's layers have two FFNs and no fc1; NACRF needs np.float, which numpy has no more.
WITHOUT_TWIN = ("conformer", "nacrf")


class MoETwinMixin(MoEModelMixin):
    """Goes before a stock model: experts in the FFNs of its encoder, its decoder, or both."""

    sides: ClassVar[tuple[str, ...]] = ("encoder", "decoder")

    @classmethod
    def options(cls) -> type:
        """Return the dataclass of the experts' options."""
        return EncoderDecoderOptions if len(cls.sides) > 1 else ModelOptions

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags and the experts'; the architecture fills in what is not given."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, cls.options()(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Build the stock model, then replace the chosen FFNs."""
        fill_in(args, cls.options())
        refuse_options(args)
        model = super().build_model(args, task)  # type: ignore[misc]
        own = {side: getattr(args, f"{side}_moe_freq", -1) for side in cls.sides}
        freqs = {side: args.moe_freq if freq == -1 else freq for side, freq in own.items()}
        bert = [sides for stock, sides in BERT_SIDES.items() if issubclass(cls, stock)]
        asked = cls.sides if getattr(args, "apply_bert_init", False) else ()
        of_sides = dict.fromkeys(set().union(asked, *bert), BERT_INIT)
        install_experts(model, args, task, freqs, of_sides)
        attach(task, model)
        return model


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


def _register_twins() -> None:
    for name, stock in list(MODEL_REGISTRY.items()):
        is_encoder = issubclass(stock, ENCODERS)
        if (
            not (is_encoder or issubclass(stock, ENCODER_DECODERS))
            or issubclass(stock, MoEModelMixin)
            or not stock.__module__.startswith("fairseq.models.")
            or any(word in name for word in WITHOUT_TWIN)
            or name not in ARCH_MODEL_INV_REGISTRY
        ):
            continue
        sides = ("encoder",) if is_encoder else ("encoder", "decoder")
        twin: Any = twin_of(stock, MoETwinMixin, module=__name__, sides=sides)
        register_model(f"moe_{name}")(twin)
        register_architectures(name, twin.options())


_register_twins()
