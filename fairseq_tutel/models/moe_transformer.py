"""moe_transformer: fairseq's encoder-decoder with experts, and its architectures."""

from typing import Any, ClassVar

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import TransformerModel

from fairseq_tutel.models.moe_transformer_lm import register_architectures
from fairseq_tutel.plugin.flags import EncoderDecoderOptions, fill_in
from fairseq_tutel.plugin.install import MoEModelMixin, install_experts, refuse_options
from fairseq_tutel.plugin.task import attach


class MoEEncoderDecoderMixin(MoEModelMixin):
    """Goes before an encoder-decoder model of fairseq: experts in the encoder, the decoder, or both.

    As the stock ones, such a model is registered without a dataclass: fairseq-train cannot build the
    nested one.
    """

    layer_options: ClassVar[dict[str, Any]] = {}

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags and the experts'; the architecture fills in what is not given."""
        super().add_args(parser)
        gen_parser_from_dataclass(
            parser, EncoderDecoderOptions(), delete_default=True, with_prefix=""
        )

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Build the stock model, then replace the chosen FFNs."""
        fill_in(args, EncoderDecoderOptions)
        refuse_options(args)
        model = super().build_model(args, task)
        freqs = {
            side: args.moe_freq if own == -1 else own
            for side, own in (
                ("encoder", args.encoder_moe_freq),
                ("decoder", args.decoder_moe_freq),
            )
        }
        install_experts(model, args, task, freqs, **cls.layer_options)
        attach(task, model)
        return model


@register_model("moe_transformer")
class MoETransformerModel(MoEEncoderDecoderMixin, TransformerModel):
    """TransformerModel with experts."""


register_architectures("transformer", EncoderDecoderOptions)
