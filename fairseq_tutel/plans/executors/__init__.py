"""Executors run collective plans on tensors, in shared memory or by messages."""
