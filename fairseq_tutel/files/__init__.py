"""Reading small untrusted files."""
