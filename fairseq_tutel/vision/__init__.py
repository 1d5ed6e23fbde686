"""Image data sets, augmentation and the Swin V2 transformer, in plain torch."""
