"""MoE twins of fairseq's transformer models.

fairseq imports this folder by itself when it is given the package's directory as `--user-dir`, so
the import must lead to the full registration.
"""

from fairseq_tutel.plugin import register

register()

from fairseq_tutel.models import (  # noqa: E402
    ensemble,  # noqa: F401
    moe_transformer_lm,  # noqa: F401
    swin_v2,  # noqa: F401
    variants,  # noqa: F401
)
