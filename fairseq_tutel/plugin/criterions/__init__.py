"""Criterions for MoE models, distillation, ensembles and image classification."""

from fairseq_tutel.plugin.criterions import distillation  # noqa: F401 - imports all other criterions
