"""Knowledge distillation: the loss and its options."""
