"""The classes beside tensors that stock fairseq pickles into its checkpoints."""

import argparse
from typing import Any

import numpy as np
import torch


def let_checkpoints_load() -> None:
    """Name these classes as safe: torch.load refuses what it does not know.

    Encoder-decoder checkpoints hold a Namespace; those of a training with --eval-bleu hold meters of
    numpy numbers and arrays.
    """
    rebuilders: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    dtypes = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, np.ndarray, np.dtype, *rebuilders, *dtypes]
    )
