"""A process in which Triton interprets its kernels on the CPU.

Triton decides at import whether it interprets, so the process of the other tests cannot do both.
"""

import os
import warnings


def interpret(_: int) -> None:
    """Set up the process: before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
