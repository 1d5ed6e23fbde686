"""ZeRO: ranks with the same parameters each keep a part of the optimizer state, optionally in host memory.

`partition`: the owner of each element, and its collectives. `state`: the optimizer's view.
"""
