"""Inference: pre-gating, offloaded experts, and ranks in lockstep."""
