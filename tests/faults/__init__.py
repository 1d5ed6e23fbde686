"""Training runs, each with one injected fault."""
