"""Converts models in the format of Hugging Face to fairseq checkpoints, and back."""
