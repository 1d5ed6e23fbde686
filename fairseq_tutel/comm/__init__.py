"""What crosses ranks: process groups, all-to-all, gradients and checkpoints of experts."""
