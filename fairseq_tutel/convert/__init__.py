"""Converts checkpoints from and to other systems, and to other kinds of models."""
