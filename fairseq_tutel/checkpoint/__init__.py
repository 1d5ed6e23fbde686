"""Saves and loads checkpoints. The number of ranks may differ between saving and loading.

- `saved`: `SavedModel` opens, edits and writes a checkpoint.
- `description`, `average`: implement the tools `inspect` and `average`.
- `experts`: gathers experts on rank 0, or writes them as `shards` in `folders`.
- `files`: writes files atomically, checks them and reads them safely.
- `lock`: allows only one training run at a time to write to a folder.
"""
