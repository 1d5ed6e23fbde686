"""Collective plans: collectives as lists of steps for each rank.

- `format`: a plan, its JSON form and the meaning of each step.
- `files`: plans by file or name, and those of a training run.
- `checker`: proof that a plan ends, has no races and gives its collective's result.
- `generators`: well-known plans by name. `msccl`: MSCCL's XML.
- `network`: the links of a cluster. `forestcoll`: trees for any network.
- `executors`: run plans on tensors. Only this folder imports torch.
"""
