"""Dispatch and combine across ranks.

`collectives`: the only module that calls torch.distributed collectives of tensors. `exchange`: a layer's
rows to their experts and back, by a `trip` of an `all_to_all`. `regroup`: the order of rows. `background`:
communication beside expert computation. `stamp`: call IDs that keep two layers' rows apart. `gradients`:
sums of expert gradients over replicas.
"""
