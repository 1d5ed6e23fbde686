"""Registers the image models `swin_v2` (dense) and `swin_v2_moe` (with experts) in several sizes.

The task of a Swin model must have the attributes `channels` and `num_classes`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fairseq.models import BaseFairseqModel, register_model
from torch import nn

from fairseq_tutel.option import options_in, read, refuse_bad_values
from fairseq_tutel.plugin.install import MoEModelMixin, install_experts
from fairseq_tutel.plugin.options import SidesConfig, options_of
from fairseq_tutel.plugin.registration.flags import made
from fairseq_tutel.vision.options import SwinConfig, SwinExpertsConfig
from fairseq_tutel.vision.swin_v2 import SwinV2

# Settings of the experts in the released SwinV2-MoE model. In the released model, experts have no bias in
# fc2; in this package, this bias starts at 0.
EXPERTS = {"activation": "gelu", "init_std": 0.005}
RELEASED = {
    "swin_form": "moe",
    "moe_top_k": 1,
    "moe_capacity_factor": 1.25,
    "moe_drop_policy": "bpr",
    "moe_gate_noise": 1.0,
    "moe_balance_loss": "load_importance_tutel:1",
    "swin_init_std": 0.005,
}
# For the size `_tiny`, which is for small images, these options replace those of RELEASED.
SMALL_IMAGES = {"swin_init_std": 0.02, "moe_balance_loss": "load_importance:1"}
# Model options, except those of an encoder or decoder, which do not apply to Swin's stages.
ALL_SIDES = [option for option in options_of("model") if option not in options_in(SidesConfig)]
SIZES: dict[str, dict[str, Any]] = {
    "": {},
    "_tiny": {
        "swin_patch_size": 2,
        "swin_embed_dim": 16,
        "swin_depths": "2,2",
        "swin_heads": "1,2",
        "swin_window": 4,
        "swin_drop_path": 0.0,
    },
    "_small": {},
    "_base": {"swin_embed_dim": 128, "swin_heads": "4,8,16,32", "swin_drop_path": 0.3},
}


class SwinV2Model(SwinV2, BaseFairseqModel):
    """A Swin V2 image classifier without experts."""

    _keeps_head = False

    def keep_head(self) -> None:
        """Keep this model's classification head when a state dict is loaded into the model."""
        self._keeps_head = True

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Replace the head in a checkpoint's state dict, in place, if this model keeps its own head."""
        if self._keeps_head:
            head = f"{name}.head" if name else "head"
            state_dict.update(self.head.state_dict(prefix=f"{head}."))
        super().upgrade_state_dict_named(state_dict, name)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> Any:
        """Build Swin V2 from the model options, and from the task's numbers of channels and classes."""
        config = read(SwinConfig, cfg)
        refuse_bad_values(config)
        return cls(config, task.channels, task.num_classes)


class SwinV2MoEModel(MoEModelMixin, SwinV2Model):
    """A Swin V2 image classifier with experts in every --moe-freq-th block of its last stages."""

    expert_stages = 0  # Only this number of last stages may have experts.

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> Any:
        """Build the dense Swin model, and replace the FFNs of the chosen blocks by experts."""
        own = read(SwinExpertsConfig, cfg)
        refuse_bad_values(own)
        model = super().build_model(cfg, task)
        model.expert_stages = own.expert_stages
        sides = [side for side, _, _ in model.moe_stacks()]
        facts = {**EXPERTS, "activation_dropout": own.expert_dropout}
        freqs, of_sides = dict.fromkeys(sides, cfg.moe_freq), dict.fromkeys(sides, facts)
        install_experts(model, cfg, task, freqs, of_sides)
        return model

    def moe_stacks(self) -> Iterable[tuple[str, str, nn.Module]]:
        """Yield each Swin stage that may have experts, as (stage, qualified name, blocks)."""
        for i in range(max(0, len(self.stages) - self.expert_stages), len(self.stages)):
            path = f"stages.{i}.blocks"
            yield f"stage {i + 1}", path, self.get_submodule(path)


def _register(name: str, model: type, options: list, defaults: dict[str, Any]) -> None:
    """Register a size of Swin V2 as a separate model, so that its name sets options under hydra, too."""
    options = [replace(o, default=defaults.get(o.key, o.default)) for o in options]
    title = "".join(part.title() for part in name.split("_"))
    cls = type(title, (model,), {"__doc__": model.__doc__, "__module__": __name__})
    globals()[title] = cls
    register_model(name, dataclass=made(f"{title}Config", options))(cls)


for _size, _sizes in SIZES.items():
    _register(f"swin_v2{_size}", SwinV2Model, [*options_in(SwinConfig)], _sizes)
    _register(
        f"swin_v2_moe{_size}",
        SwinV2MoEModel,
        [*options_in(SwinConfig), *options_in(SwinExpertsConfig), *ALL_SIDES],
        _sizes | RELEASED | (SMALL_IMAGES if _size == "_tiny" else {}),
    )
