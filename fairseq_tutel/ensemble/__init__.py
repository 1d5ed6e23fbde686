"""Ensembles of models: feature sharing between members, and a loss that lets members specialize."""
