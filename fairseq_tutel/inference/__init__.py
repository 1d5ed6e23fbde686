"""Inference: pre-gating, stores for offloaded experts, and expert parallelism without a fixed schedule."""
