"""Strategies to run a MoE layer, a model of their costs, and the tuner. Nothing here imports torch."""
