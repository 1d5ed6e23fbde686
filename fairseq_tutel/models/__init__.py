"""MoE twins of fairseq's transformer models.

fairseq imports this folder by itself when it is given the package's directory as `--user-dir`, so
the import must lead to the full registration.
"""

from fairseq_tutel.plugin import register

register()

from fairseq_tutel.models import moe_transformer_lm, swin_v2, twins  # noqa: E402, F401
