"""Reads small untrusted files, and replaces files atomically."""
