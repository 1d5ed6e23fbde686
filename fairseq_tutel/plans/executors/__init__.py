"""Executors run collective plans on tensors in shared memory, by messages or, for tests, on one GPU."""
