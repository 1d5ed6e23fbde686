"""Criterions for MoE models, distillation, ensembles and image classification."""

from fairseq_tutel.plugin.criterions import distillation  # noqa: F401 - it imports all other criterions
