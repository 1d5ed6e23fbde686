"""ForestColl: the fastest trees of a network.

`optimum`: the lower bound and the number of trees. `edge_splitting`: removal of switches. `tree_packing`:
the trees. `forest`: all three in turn. `max_flow`: the flows that they need. `all_to_all_bounds`: bounds of
an all-to-all.
"""
