"""Knowledge distillation: the loss, its options, and teacher logits that are stored in files."""
