"""ZeRO: the optimizer state is sharded over the ranks that have the same parameters."""
