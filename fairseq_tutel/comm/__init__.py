"""Dispatch and combine across ranks; start at `exchange`."""
