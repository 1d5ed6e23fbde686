"""Training: configuration checks, start, the task, resuming, saving, checks for finite state."""
