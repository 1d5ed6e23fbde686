"""Criterions with the balance loss of experts, distillation, ensembles and images."""

from fairseq_tutel.criterions import distillation  # noqa: F401 - imports the others, which it wraps
