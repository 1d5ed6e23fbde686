"""ForestColl: the fastest trees of a network.

`optimum`: the lower bound and the number of trees. `edge_splitting`: removal of switches. `tree_packing`:
the trees. `forest`: all three in turn. `max_flow`: the flows that they need.
"""
