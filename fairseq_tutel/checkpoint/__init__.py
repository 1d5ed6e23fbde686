"""Experts in files, whatever the number of ranks that wrote them or will read them.

`experts`: which rank gathers or writes what. `shards`: how a shard is written and read (`write_file`,
`ShardedTensor`). `folders`: where shards stand, and when they go. `files`: a whole file or none. `lease`:
one training a folder.
"""
