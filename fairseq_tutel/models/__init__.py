"""MoE variants of fairseq's models, ensembles and Swin V2.

With the package's directory as `--user-dir`, fairseq imports this folder itself, so that the import must
register everything.
"""

from fairseq_tutel.plugin import register

register()

from fairseq_tutel.models import (  # noqa: E402
    ensemble,  # noqa: F401
    swin_v2,  # noqa: F401
    variants,  # noqa: F401
)
