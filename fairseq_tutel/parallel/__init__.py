"""Code for several ranks: groups, failures, exchange of rows, gradients, ZeRO, and predicted times."""
