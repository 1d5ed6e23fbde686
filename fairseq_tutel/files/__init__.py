"""Reading small untrusted files, and replacing files atomically."""
