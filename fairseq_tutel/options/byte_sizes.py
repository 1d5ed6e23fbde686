"""Parses sizes in bytes, such as 512MiB."""

import re

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]i?B)")


def bytes_of(text: str) -> int | None:
    """Return the number of bytes of a number with one of UNITS; None if the text is anything else."""
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * UNITS[found[2]]) if found else None
