"""Checkpoints: saved by any number of ranks, read by any other.

- `saved`: `SavedModel` opens, edits and writes a checkpoint.
- `description`, `average`: what `inspect` and `average` do.
- `experts`: gathers experts on rank 0, or writes them as `shards` in `folders`.
- `files`: atomic writes, checks and safe reading of files. `lease`: one training run per folder.
"""
