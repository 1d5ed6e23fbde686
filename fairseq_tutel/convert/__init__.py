"""Functions that convert checkpoints: from and to other systems, and to other kinds of models."""
