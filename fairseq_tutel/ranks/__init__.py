"""The ranks of a job: rendezvous, process groups, agreement on options, failure detection.

- `guard`: errors of collectives, which name missing ranks; start here.
- `world`: this rank, the number of ranks, and collectives of Python objects.
- `agreement`: compares all ranks' options.
- `rendezvous`: creates the default group within a time-out.
- `groups`: the ranks that exchange tokens, and the experts that each holds.
"""
