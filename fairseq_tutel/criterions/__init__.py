"""Criterions that train the experts' balance loss beside their own."""

from fairseq_tutel.criterions import (  # noqa: F401
    cmcl,
    image_classification,
    moe_cross_entropy,
    variants,
)

# isort: split
from fairseq_tutel.criterions import distillation  # noqa: F401 - which goes before any of these
