"""Checkpoints: saved by any number of ranks, read by any other.

- `saved`: `SavedModel` opens, edits and writes a checkpoint. `reading` opens files safely.
- `description`, `average`: what `inspect` and `average` do.
- `experts`: gathers experts on rank 0, or writes them as `shards` in `folders`.
- `files`: atomic writes and checks of files. `lease`: one training run per folder.
"""
