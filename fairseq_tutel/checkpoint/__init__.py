"""Saves and loads checkpoints; the number of ranks may differ between saving and loading.

- `saved`: The package checkpoint has these modules:
- `description` and `average` implement the tools `inspect` and `average`.
- `experts` gathers experts on rank 0, or writes experts as `shards` in `folders`.
- `files` writes files atomically, and checks and reads files safely.
- `lock` allows only one training run at a time to write to a folder.
"""
