"""Saves and loads checkpoints; the number of ranks may differ between saving and loading.

- `saved` opens, edits and writes a fairseq checkpoint as a `SavedModel`.
- `description` and `average` implement the tools `inspect` and `average`.
- `experts` gathers experts on rank 0, or writes shard files (`shards`) to a folder (`folders`).
- `atomic_save` writes files atomically, and `files` checks and reads files safely.
- `lock` allows only one training run at a time to write to a folder.
"""
