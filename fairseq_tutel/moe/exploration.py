"""Exploration: noise before and after the gate, in training only.

T tokens, D model_dim, E experts. All of it is drawn from torch's global generator, which fairseq reseeds
every update and activation checkpointing restores, so that a recompute and a resume route alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.moe.config import MoEConfig


def gate_input(x_TD: Tensor, config: MoEConfig, training: bool) -> Tensor:
    """Return what the gate sees: x with multiplicative jitter and dropout; the experts see x itself.

    Jitter multiplies every element by a number uniform in [1 - j, 1 + j].

    Source: Switch Transformer (Fedus et al. 2021), section 2.4, for both.
    """
    if not training:
        return x_TD
    if config.input_jitter > 0:
        # In half precision there are few numbers near 1, more of them below it than above.
        wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        low, high = 1 - config.input_jitter, 1 + config.input_jitter
        x_TD = (wide_TD * torch.empty_like(wide_TD).uniform_(low, high)).to(x_TD.dtype)
    return F.dropout(x_TD, config.input_dropout, training) if config.input_dropout else x_TD


def noisy_logits(logits_TE: Tensor, config: MoEConfig, training: bool) -> Tensor:
    """Add gaussian noise of standard deviation gate_noise / E.

    Choice, weights and balance losses all take the noisy logits, as Tutel's do.
    """
    if not training or config.gate_noise == 0:
        return logits_TE
    return logits_TE + torch.randn_like(logits_TE) * (config.gate_noise / logits_TE.shape[1])
