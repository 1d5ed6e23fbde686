"""Ways to run a layer and their costs, without torch.

`strategy`: what may change from update to update. `machine` and `links`: hardware profiles and times of
collectives. `cost`: time and memory of a step. `tuner`: choice by measuring.
"""
