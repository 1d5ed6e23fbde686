"""Executors of plans on tensors: shared memory, two-sided messages, and one GPU, for tests."""
