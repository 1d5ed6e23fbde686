"""Inference with pre-gating or offloaded experts, and with ranks that call layers at different times."""
