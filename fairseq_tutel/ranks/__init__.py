"""The ranks of a job: rendezvous, process groups, agreement on options, failure detection."""
