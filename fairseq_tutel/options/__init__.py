"""Defines options; each table of options is in the package that it configures."""
