"""moe_bart: fairseq's denoising encoder-decoder with experts, and its architectures."""

from typing import Any, ClassVar

from fairseq.models import register_model
from fairseq.models.bart import BARTModel

from fairseq_tutel.models.moe_roberta import BERT_INIT
from fairseq_tutel.models.moe_transformer import MoEEncoderDecoderMixin
from fairseq_tutel.models.moe_transformer_lm import register_architectures
from fairseq_tutel.plugin.flags import EncoderDecoderOptions


@register_model("moe_bart")
class MoEBARTModel(MoEEncoderDecoderMixin, BARTModel):
    """BARTModel with experts."""

    layer_options: ClassVar[dict[str, Any]] = BERT_INIT


register_architectures("bart", EncoderDecoderOptions)
