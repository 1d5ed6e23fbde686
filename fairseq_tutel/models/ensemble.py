"""Defines the model `ensemble_of`, which averages the probabilities of models of one architecture.

The state dict has the members' weights under `members.0.`, `members.1.`, …. All members draw initial
weights from one random generator, one after another. The first member therefore has the same initial
weights as a single model. Members run one after another; a batched forward is slower (docs/ensembles.md).
Shape suffixes are M (members) and C (classes).
"""

import argparse
import sys
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from fairseq.dataclass.utils import gen_parser_from_dataclass, interpret_dc_type
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_REGISTRY,
    BaseFairseqModel,
    build_model,
    register_model,
    register_model_architecture,
)
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_tutel.models.feature_sharing import run_and_share, shared
from fairseq_tutel.option import options_in, read, refuse_bad_values
from fairseq_tutel.plugin.criterions.confident_loss import mean_log_probs
from fairseq_tutel.plugin.ensemble_options import EnsembleConfig
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.registration.flags import fill_in, made
from fairseq_tutel.plugin.run_state import OPENED, config_of, is_opened, is_training, root_of

NAME = "ensemble_of"
EnsembleOptions = made("EnsembleOptions", options_in(EnsembleConfig))


@register_model(NAME)
class EnsembleModel(BaseFairseqModel):
    """An ensemble of M models that get the same input, and whose probabilities are averaged."""

    def __init__(self, members: list[nn.Module], config: EnsembleConfig) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.config = config
        if config.ensemble_share_after:
            self._refuse_layer()

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the flags of the ensemble and of its members, whose architecture is read from sys.argv."""
        gen_parser_from_dataclass(parser, EnsembleOptions(), delete_default=True)
        words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        words.add_argument("--arch", "-a")
        words.add_argument("--ensemble-arch", default="")
        given, _ = words.parse_known_args(sys.argv[1:])
        if given.ensemble_arch or given.arch == NAME:
            member = _class_of(given.ensemble_arch)
            member.add_args(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "EnsembleModel":
        """Build the member models of the ensemble; members do not share experts."""
        config = read(EnsembleConfig, args)
        refuse_bad_values(config)
        seed = int(root_of(task).common.seed) if is_training(task, args) else None
        members = []
        for m in range(config.ensemble_size):
            members.append(build_model(_member_options(args, task), task))
            for layer in moe_layers(members[m]):
                layer.become_member(m, seed)
        if any(isinstance(module, AdaptiveSoftmax) for module in members[0].modules()):
            raise ValueError(
                "--adaptive-softmax-cutoff is given, but --arch ensemble_of needs the probability of every "
                "word, which an adaptive softmax does not compute; remove it."
            )
        return cls(members, config)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Run all members on the input, and average their probabilities.

        The result is a pair (log mean probabilities [..., C], {"member_logits": [M, ..., C]}).
        """
        runs = [partial(member, *args, **kwargs) for member in self.members]
        if self.config.ensemble_share_after:
            share = partial(shared, keep=self.config.ensemble_share_keep, training=self.training)
            layers = [member.get_submodule(self.config.ensemble_share_after) for member in self.members]
            outputs = run_and_share(runs, layers, share)
        else:
            outputs = [run() for run in runs]
        logits_MXC = torch.stack([_logits_of(output) for output in outputs])
        del outputs  # This frees memory: the outputs are as large as the logits.
        return mean_log_probs(logits_MXC), {"member_logits": logits_MXC}

    def get_normalized_probs(
        self, net_output: Any, log_probs: bool, sample: dict[str, Any] | None = None
    ) -> Tensor:
        """Return the mean of the members' probabilities, or the logarithm of the mean."""
        return net_output[0] if log_probs else net_output[0].exp()

    def max_positions(self) -> Any:
        """Return the maximum input length of the ensemble's members."""
        return self.members[0].max_positions()  # type: ignore[operator]

    @property
    def supported_targets(self) -> Any:
        """The kinds of targets that all members accept from a language modeling task."""
        return self.members[0].supported_targets

    def _refuse_layer(self) -> None:
        name, member = self.config.ensemble_share_after, self.members[0]
        modules = dict(member.named_modules())
        member.get_submodule(name)  # This call raises an error for a missing layer.
        above = [modules[path] for path in modules if name.startswith(f"{path}.")]
        if any(hasattr(module, "precheckpoint_forward") for module in above):  # These are recomputed.
            raise ValueError(
                f"--ensemble-share-after is {name}, which activation checkpointing recomputes for each "
                "member alone; name a complete layer, or turn off activation checkpointing."
            )


def _logits_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple | list) else output


def _class_of(arch: str) -> Any:
    if arch not in ARCH_MODEL_REGISTRY or arch == NAME:
        raise ValueError(
            f"--ensemble-arch is {arch!r}, which is not an architecture for the members of --arch "
            "ensemble_of; give another architecture that --arch accepts."
        )
    return ARCH_MODEL_REGISTRY[arch]


def _member_options(args: Any, task: Any) -> Any:
    """Return the options for building one member of the ensemble, as a dataclass or a Namespace."""
    arch = args.ensemble_arch
    options = getattr(_class_of(arch), "__dataclass", None)
    flat: Any = OmegaConf.to_container(args, resolve=True) if OmegaConf.is_config(args) else vars(args)
    own = {item.key for item in options_in(EnsembleConfig)}
    given = {key: value for key, value in flat.items() if key not in own and key != "_name"}
    if options is None:
        return argparse.Namespace(**{**given, "_name": arch, "arch": arch})
    known = {item.name: interpret_dc_type(item.type) for item in fields(options)}
    # An architecture may set an integer option to False, as transformer_lm_gpt does.
    values = {
        key: int(given[key]) if known[key] is int and isinstance(given[key], bool) else given[key]
        for key in given.keys() & known.keys()
    }
    member = OmegaConf.merge(options(), values)
    member._name = arch
    # Interpolations, such as ${task.tokens_per_sample}, refer to the run's configuration.
    root = args._get_root() if OmegaConf.is_config(args) else root_of(task)
    member.__dict__["_parent"] = root if root is not None else OmegaConf.create({"task": config_of(task)})
    if is_opened(args):
        member._set_flag(OPENED, True)
    return member


@register_model_architecture(NAME, NAME)
def architecture(args: Any) -> None:
    """Set missing options of the ensemble and of its members' architecture to their defaults."""
    fill_in(args, EnsembleOptions)
    _class_of(args.ensemble_arch)
    ARCH_CONFIG_REGISTRY[args.ensemble_arch](args)
