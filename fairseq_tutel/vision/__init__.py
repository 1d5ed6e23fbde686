"""Images and the Swin transformer in plain torch."""
