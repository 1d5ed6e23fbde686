"""moe_transformer: fairseq's encoder-decoder with experts, and its architectures."""

from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import TransformerModel

from fairseq_tutel.flags import EncoderDecoderOptions, defaults
from fairseq_tutel.models.build import install_experts, refuse_options
from fairseq_tutel.models.moe_transformer_lm import register_architectures
from fairseq_tutel.task_mixin import attach


@register_model("moe_transformer")
class MoETransformerModel(TransformerModel):
    """TransformerModel with experts in the encoder, the decoder, or both.

    As stock's, it is registered without a dataclass: fairseq-train cannot build the nested one.
    """

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags and the experts'; the architecture fills in what is not given."""
        super().add_args(parser)
        gen_parser_from_dataclass(
            parser, EncoderDecoderOptions(), delete_default=True, with_prefix=""
        )

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MoETransformerModel":
        """Build the stock model, then replace the chosen FFNs."""
        for key, value in defaults(EncoderDecoderOptions).items():
            setattr(args, key, getattr(args, key, value))
        refuse_options(args)
        model = super().build_model(args, task)
        freqs = {
            side: args.moe_freq if own == -1 else own
            for side, own in (
                ("encoder", args.encoder_moe_freq),
                ("decoder", args.decoder_moe_freq),
            )
        }
        install_experts(model, args, task, freqs)
        attach(task, model)
        return model


register_architectures("transformer", EncoderDecoderOptions)
