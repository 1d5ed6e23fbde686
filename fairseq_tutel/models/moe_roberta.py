"""moe_roberta: fairseq's masked language model with experts, and its architectures."""

from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.roberta import RobertaModel

from fairseq_tutel.models.moe_transformer_lm import register_architectures
from fairseq_tutel.plugin.flags import ModelOptions, fill_in
from fairseq_tutel.plugin.install import MoEModelMixin, install_experts, refuse_options
from fairseq_tutel.plugin.task import attach

# What fairseq's init_bert_params does to every linear layer of these models.
BERT_INIT = {"init_std": 0.02}


@register_model("moe_roberta")
class MoERobertaModel(MoEModelMixin, RobertaModel):
    """RobertaModel whose every --moe-freq-th layer has experts for an FFN."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the stock flags and the experts'; the architecture fills in what is not given."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, ModelOptions(), delete_default=True, with_prefix="")

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MoERobertaModel":
        """Build the stock model, then replace the chosen FFNs."""
        fill_in(args, ModelOptions)
        refuse_options(args)
        model = super().build_model(args, task)
        install_experts(model, args, task, {"encoder": args.moe_freq}, **BERT_INIT)
        attach(task, model)
        return model


register_architectures("roberta", ModelOptions)
