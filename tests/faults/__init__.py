"""Trainings that are hit by one random fault each: `python -m tests.faults --help`."""
