"""A --user-dir that loads the plugin, and saves inputs and outputs of MoE layers in the file $WATCHED.

For each of the first 8 calls, the file has (layer name, x [T, B, D], padding mask or None, y [T, B, D]).
"""

import os

import torch

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

CALLS = 8

register()

_seen = []


def _watched(original):
    def forward(self, x):
        mask = self._padding_mask
        y = original(self, x)
        if len(_seen) < CALLS:
            _seen.append((self.name, x.clone(), None if mask is None else mask.clone(), y.clone()))
            torch.save(_seen, os.environ["WATCHED"])
        return y

    return forward


MoEFeedForward.forward = _watched(MoEFeedForward.forward)
