"""What ranks with the same parameters keep a part of each (ZeRO), and what of it is in host memory.

`partition`: who owns what. `reduce`: gradients there, weights back. `state`: what an optimizer sees of it.
"""
