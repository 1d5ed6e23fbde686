"""Ways to run a layer and what they cost, without torch.

`strategy`: what may change from update to update. `machine` and `links`: how fast a cluster is, and what
collectives take on it. `cost` and `memory`: what a step takes and holds, by formula. `tuner`: by measuring.
`plan`: a collective as steps of its ranks, which `plan_check` proves. `schedule`: well-known ones by name.
`plan_files`: either, and MSCCL's files (`msccl_reader`, `msccl_writer`).
"""
