"""Reading small files that may come from anybody."""
