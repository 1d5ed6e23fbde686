"""A --user-dir of your own together with the plugin: a gate, an expert, a model and a criterion.

docs/python.md explains it.
"""

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

import fairseq_tutel as ft
from fairseq_tutel.plugin import register

register()  # all flags, tasks, criterions, optimizers and moe_ models of the plugin, as in user_dir/


class CalmGate(nn.Linear):
    """A linear gate whose logits stay between -4 and 4."""

    def __init__(self, config):
        super().__init__(config.model_dim, config.num_experts)

    def forward(self, x_TD):
        """Return logits_TE."""
        return 4 * torch.tanh(super().forward(x_TD))


class TanhExpert(nn.Sequential):
    """A feed-forward network with tanh."""

    def __init__(self, config):
        up, down = (config.model_dim, config.hidden_dim), (config.hidden_dim, config.model_dim)
        super().__init__(nn.Linear(*up), nn.Tanh(), nn.Linear(*down))


class Experts(nn.Module):
    """A MoE layer that returns only its output, as fairseq's layers expect."""

    def __init__(self, config):
        super().__init__()
        self.moe = ft.MoELayer(config)

    def forward(self, x):
        """Map x [time, batch, D] to the same shape."""
        return self.moe(x, time_first=True)[0]


@register_model("my_lm", dataclass=TransformerLanguageModelConfig)
class MyLanguageModel(TransformerLanguageModel):
    """fairseq's language model with four experts in place of the FFN of every second layer."""

    @classmethod
    def build_model(cls, args, task):
        """Build fairseq's model and replace FFNs."""
        model = super().build_model(args, task)
        for layer in model.decoder.layers[1::2]:
            config = ft.MoEConfig(
                model_dim=layer.fc1.in_features,
                hidden_dim=layer.fc1.out_features,
                num_experts=4,
                activation="relu",
            )
            layer.fc1, layer.fc2, layer.activation_fn = Experts(config), nn.Identity(), nn.Identity()
        return model


@register_criterion("my_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class MyCrossEntropy(CrossEntropyCriterion):
    """Cross entropy plus 0.01 times the balance losses of all MoE layers."""

    def forward(self, model, sample, reduce=True):
        """Return loss, sample size and log, as fairseq's criterions do."""
        losses = []
        layers = [module for module in model.modules() if isinstance(module, ft.MoELayer)]
        hooks = [
            each.register_forward_hook(lambda *call: losses.append(call[2][1].balance_loss))
            for each in layers
        ]
        loss, sample_size, log = super().forward(model, sample, reduce)
        for hook in hooks:
            hook.remove()
        return loss + 0.01 * sample_size * sum(losses), sample_size, log
