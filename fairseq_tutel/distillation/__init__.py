"""A student that learns from a teacher: the loss, and a teacher's answers in files."""
