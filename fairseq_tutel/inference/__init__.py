"""Inference: pre-gating, offloaded experts, and the agreement of ranks on the next layer call."""
