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
    """TransformerLanguageModel with experts in every --moe-freq-th layer."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MoETransformerLanguageModel":
        """Build the stock model, then replace the chosen FFNs."""
        _warn_of_hydra(args)
        _fill_in(args)
        stock_args = _with_scales(args)
        refuse_options(args)
        model = super().build_model(stock_args, task)
        install_experts(model, args, task, {"decoder": args.moe_freq})
        return model


def _warn_of_hydra(args: Any) -> None:
    """Warn if an architecture's name sets no sizes, as for fairseq's language models under hydra."""
    name = getattr(args, "_name", None)
    if HydraConfig.initialized() and name in ARCH_CONFIG_REGISTRY and name != "moe_transformer_lm":
        logger.warning(
            "fairseq-hydra-train takes no sizes from the architecture's name %s; give model.decoder_layers "
            "and the like, or train by fairseq-train --arch %s",
            name,
            name,
        )


def _fill_in(args: Any) -> None:
    """Add the dataclass's defaults that a hydra file with an architecture's name lacks."""
    if not OmegaConf.is_config(args):
        return
    with open_dict(args):
        for item in fields(MoETransformerLanguageModelConfig):
            interpolated = isinstance(item.default, str) and item.default.startswith("${")
            if item.name not in args and not interpolated:
                args[item.name] = item.default


def _with_scales(args: Any) -> Any:
    """Return args in a form that keeps --scale-fc and similar options.

    fairseq's TransformerConfig.from_namespace copies unknown options from a Namespace, but drops those of
    the configuration that fairseq-train passes.
    """
    scales = ("scale_fc", "scale_attn", "scale_heads", "scale_resids")
    if not OmegaConf.is_config(args) or not any(args[key] for key in scales):
        return args
    plain: Any = OmegaConf.to_container(args, resolve=True)
    return argparse.Namespace(**plain)


register_architectures("transformer_lm", ModelOptions)
