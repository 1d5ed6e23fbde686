"""ZeRO: ranks with the same parameters each keep a part of the optimizer state."""
