"""Who the ranks are, how they meet, and what they are told when one is missing.

`guard`: why one rank's death ends the job, and with which sentence; begin there. `world`: which rank this
is, and what ranks tell each other. `agreement`: whether they were started alike. `rendezvous`: how they
find each other. `groups`: which of them exchange tokens, and which experts each holds.
"""
