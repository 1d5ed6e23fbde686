"""Saves and loads checkpoints; the number of ranks may differ between saving and loading.

- `saved` opens, edits and writes a fairseq checkpoint as a `SavedModel`.
- `description` and `average` implement the tools `inspect` and `average`.
- `experts` saves the experts of all ranks: rank 0 gathers them, or each rank writes shard files.
- `shards` reads and writes shard files, and `folders` creates and deletes the folders of shard files.
- `atomic_save` writes files atomically, and `files` reads files without running pickled code.
- `lock` allows only one training run at a time to write to a folder.
"""
