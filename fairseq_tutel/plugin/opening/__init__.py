"""Opens checkpoints for inference: loads them, offloads experts, and spreads experts over ranks."""
