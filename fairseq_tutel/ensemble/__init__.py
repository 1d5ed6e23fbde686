"""Several models as one: their members, and the losses that make specialists of them."""
