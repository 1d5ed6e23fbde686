"""Strategies of a layer, their costs on a cluster, and the choice among them. No torch."""
