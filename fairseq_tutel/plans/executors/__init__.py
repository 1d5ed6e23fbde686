"""Executors: run plans on tensors.

`backend` chooses the plan of each collective. `one_sided` runs it in shared memory, `two_sided` by
messages, `one_device` on one GPU for tests. `layout` maps chunks to elements.
"""
