"""What grows with the number of ranks, measured with simulated ones; `python -m benchmarks.scale`."""
