"""ZeRO: each rank keeps a part of the optimizer state of parameters that several ranks have."""
