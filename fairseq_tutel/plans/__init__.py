"""Collective plans: programs that perform a collective, as a list of steps for each rank.

- `format`: the classes of a plan, its JSON format and the meaning of each step.
- `files`: reads and writes plan files, and reads the plans of a run.
- `checker`: proves that a plan ends, has no races and computes its collective.
- `generators`: makes well-known plans by name. `msccl`: reads and writes MSCCL's XML files.
- `network`: describes the links of a cluster. `forestcoll`: finds trees for any network.
- `executors`: run plans on tensors. Only this folder imports torch.
"""
