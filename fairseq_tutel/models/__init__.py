"""Registers fairseq models: MoE variants of fairseq's own models, ensembles, and Swin V2.

If --user-dir is the directory of this package, fairseq imports this folder directly. Therefore, importing
the folder registers the complete plugin.
"""

from fairseq_tutel.plugin import register

register()

from fairseq_tutel.models import (  # noqa: E402
    ensemble,  # noqa: F401
    swin_v2,  # noqa: F401
    variants,  # noqa: F401
)
