"""A checkpoint that is opened for use: loading it, offloaded experts, several ranks."""
