"""Conversions of checkpoints, as functions: from and to other systems, and other kinds of models."""
