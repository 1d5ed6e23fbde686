"""MSCCL's XML files: `reader` makes plans of them, `writer` makes them of plans."""
