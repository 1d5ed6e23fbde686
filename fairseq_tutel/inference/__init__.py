"""Models in use, on several ranks."""
