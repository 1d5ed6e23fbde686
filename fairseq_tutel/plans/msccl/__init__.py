"""MSCCL's XML files: `reader` converts them to collective plans, and `writer` converts plans to them."""
