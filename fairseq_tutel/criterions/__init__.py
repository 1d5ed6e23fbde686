"""Criterions that train the experts' balance loss beside their own."""

from fairseq_tutel.criterions import image_classification, moe_cross_entropy, twins  # noqa: F401
