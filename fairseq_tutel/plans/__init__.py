"""A collective plan is a program for a collective, as a list of steps for each rank.

- `format` has the classes of a collective plan, its JSON format and the meaning of each step.
- `files` reads and writes collective plans, and reads the plans of a training run.
- `checker` proves that a collective plan ends, has no races and computes its collective.
- `generators` makes well-known collective plans by name. `msccl` reads and writes MSCCL's XML files.
- `network` describes the links of a cluster. `forestcoll` finds communication trees for any network.
- `executors` run collective plans on tensors. Only `executors` imports torch.
"""
