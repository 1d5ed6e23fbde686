"""`python -m tests.faults`, from the repository's root."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "helpers"), str(TESTS / "e2e")]
    from faults.program import main

    sys.exit(main())
