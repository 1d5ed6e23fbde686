"""ZeRO: ranks with the same parameters each keep a part of the optimizer state, optionally in host memory.

`partition`: the owner of each element. `reduce`: collectives of gradients and weights. `state`: the
optimizer's view.
"""
