"""Defines options. The tables of options are in the packages that they configure."""
