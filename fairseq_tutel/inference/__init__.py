"""Models in use: pre-gating, experts in a store, ranks in lockstep."""
