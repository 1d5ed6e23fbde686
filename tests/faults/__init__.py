"""Tests training runs with injected faults, such as a killed rank or a full disk."""
