"""For every test: one thread, and uninitialised memory that shows."""

import torch
from poison import poison_empty

torch.set_num_threads(1)
poison_empty()
