"""Dispatch and combine across ranks.

- `collectives`: the only module that calls torch.distributed collectives of tensors.
- `exchange`: sends a layer's rows to their experts and back, by an `all_to_all`.
- `regroup`: reorders rows.
- `background`: overlaps communication with expert computation.
- `call_id`: call IDs that ranks compare before an exchange.
- `gradients`: sums expert gradients over EP replicas.
"""
