"""Opens checkpoints for use: loads them, offloads experts, and shares experts between ranks."""
