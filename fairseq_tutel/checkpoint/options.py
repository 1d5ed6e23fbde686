"""The dtypes of stored experts, in a file that does not import torch."""

# Dtypes to which the experts of a sharded checkpoint can be converted.
EXPERT_DTYPES = ("bf16", "int8", "int4")
