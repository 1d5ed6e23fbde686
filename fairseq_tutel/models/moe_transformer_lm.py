"""moe_transformer_lm: fairseq's decoder-only language model with experts, and its architectures."""

import argparse
import logging
from dataclasses import dataclass, fields
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from fairseq_tutel.models.variants import register_architectures
from fairseq_tutel.plugin.install import MoEModelMixin, install_experts, refuse_options
from fairseq_tutel.plugin.registration.flags import ModelOptions

logger = logging.getLogger(__name__)


@dataclass
class MoETransformerLanguageModelConfig(ModelOptions, TransformerLanguageModelConfig):  # type: ignore[valid-type,misc]
    """The stock model's options, then the experts'."""


@register_model("moe_transformer_lm", dataclass=MoETransformerLanguageModelConfig)
class MoETransformerLanguageModel(MoEModelMixin, TransformerLanguageModel):
    """TransformerLanguageModel whose every --moe-freq-th layer has experts for an FFN."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MoETransformerLanguageModel":
        """Build the stock model, then replace the chosen FFNs."""
        _say_what_hydra_leaves_out(args)
        _fill_in(args)
        stock_args = _with_scales(args)
        refuse_options(args)
        model = super().build_model(stock_args, task)
        install_experts(model, args, task, {"decoder": args.moe_freq})
        return model


def _say_what_hydra_leaves_out(args: Any) -> None:
    """Warn where an architecture's name brings none of its sizes, as for stock's language models."""
    name = getattr(args, "_name", None)
    if HydraConfig.initialized() and name in ARCH_CONFIG_REGISTRY and name != "moe_transformer_lm":
        logger.warning(
            "fairseq-hydra-train takes no sizes from the architecture's name %s; give model.decoder_layers "
            "and the like, or train by fairseq-train --arch %s",
            name,
            name,
        )


def _fill_in(args: Any) -> None:
    """Add the dataclass's defaults that a hydra file with an architecture's name does not bring."""
    if not OmegaConf.is_config(args):
        return
    with open_dict(args):
        for item in fields(MoETransformerLanguageModelConfig):
            interpolated = isinstance(item.default, str) and item.default.startswith("${")
            if item.name not in args and not interpolated:
                args[item.name] = item.default


def _with_scales(args: Any) -> Any:
    """Return args in a form that keeps --scale-fc and its like.

    Stock's TransformerConfig.from_namespace copies unknown options from a Namespace but loses them,
    silently, from the configuration object that fairseq-train passes.
    """
    scales = ("scale_fc", "scale_attn", "scale_heads", "scale_resids")
    if not OmegaConf.is_config(args) or not any(args[key] for key in scales):
        return args
    plain: Any = OmegaConf.to_container(args, resolve=True)
    return argparse.Namespace(**plain)


register_architectures("transformer_lm", ModelOptions)
