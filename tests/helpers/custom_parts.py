"""Custom gates and experts, which tests name in options, as in `expert_type="custom_parts.DeepExpert"`."""

import torch
from torch import Tensor, nn


class CalmGate(nn.Linear):
    """This gate has a bias and bounded logits, and its reset_parameters accepts no generator."""

    def __init__(self, config) -> None:
        super().__init__(config.model_dim, config.num_experts)

    def forward(self, x_TD: Tensor) -> Tensor:
        return 2 * torch.tanh(super().forward(x_TD))


class ShortGate(CalmGate):
    """This wrong gate returns no logit for the last expert."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return super().forward(x_TD)[:, :-1]


class DeepExpert(nn.Module):
    """This expert has nested modules, a scalar and a frozen parameter, dropout, and a sum over units."""

    def __init__(self, config) -> None:
        super().__init__()
        up, down = (config.model_dim, config.hidden_dim), (config.hidden_dim, config.model_dim)
        self.body = nn.Sequential(nn.Linear(*up), nn.Tanh(), nn.Linear(*down, bias=False))
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.shift = nn.Parameter(torch.full((config.model_dim,), 0.1), requires_grad=False)
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.body[1](self.body[0](rows))
        hidden = self.dropout(hidden) * (1 + hidden.sum(dim=1, keepdim=True).sigmoid())
        return self.scale * self.body[2](hidden) + self.shift


class PlainExpert(nn.Sequential):
    """This expert has only linear layers, so under autocast its output has autocast's dtype."""

    def __init__(self, config) -> None:
        up, down = (config.model_dim, config.hidden_dim), (config.hidden_dim, config.model_dim)
        super().__init__(nn.Linear(*up), nn.Linear(*down))


class BufferExpert(DeepExpert):
    """This wrong expert has a buffer, which all experts would share."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(3))


class NoExpert(nn.Module):
    """This wrong expert has no parameters."""

    def __init__(self, config) -> None:
        super().__init__()


class CountingExpert(nn.Module):
    """The first parameter of this expert is a frozen integer."""

    def __init__(self, config) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        self.map = nn.Linear(config.model_dim, config.model_dim)

    def forward(self, rows: Tensor) -> Tensor:
        return self.map(rows)
