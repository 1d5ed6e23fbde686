"""A --user-dir that loads the plugin, and makes fairseq spawn two ranks, as on a machine with two GPUs."""

import torch

from fairseq_tutel.plugin import register

torch.cuda.device_count = lambda: 2
register()
