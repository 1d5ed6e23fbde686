"""MSCCL's XML files, which `reader` converts to collective plans and `writer` makes from plans."""
