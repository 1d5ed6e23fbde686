"""Criterions with the balance loss of experts, distillation, ensembles and images."""

from fairseq_tutel.criterions import (  # noqa: F401
    cmcl,
    image_classification,
    variants,
)

# isort: split
from fairseq_tutel.criterions import distillation  # noqa: F401 - it wraps the others
