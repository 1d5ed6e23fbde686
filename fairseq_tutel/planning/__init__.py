"""Strategies of a layer, a model of their costs on a cluster, and the tuner. Nothing here imports torch."""
