"""Leases of writers that do not run here, for tests of who may write into a folder."""

import json
import os
from dataclasses import asdict

from fairseq_tutel.checkpoint.lease import NAME, Writer

ELSEWHERE = Writer("node7", 12, "another machine", "1", "0123abcd")


def leave(folder, writer, seconds=0.0):
    """Write a lease as a writer has it that renewed it so long ago."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    with open(path, "w") as file:
        json.dump(asdict(writer), file)
    now = os.stat(path).st_mtime
    os.utime(path, (now - seconds, now - seconds))
    return path
