"""A --user-dir that loads the plugin, and writes inputs and outputs of MoE layers to the file $WATCHED.

The file has a list with (layer name, x [time, batch, D], padding mask or None, y) for the first calls.
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
