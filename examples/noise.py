"""Add noise to plain text for a denoising task: python examples/noise.py < text > noised.

Each word is deleted with probability DELETED; all other words move by less than WINDOW positions.
"""

import random
import sys

DELETED = 0.2
WINDOW = 3


def main() -> None:
    """Write every line of standard input with noise; every run draws the same noise."""
    generator = random.Random(1)
    for line in sys.stdin:
        words = line.split()
        kept = [word for word in words if generator.random() >= DELETED] or words[:1]
        places = [i + generator.uniform(0, WINDOW) for i in range(len(kept))]
        print(" ".join(word for _, word in sorted(zip(places, kept, strict=True))))


if __name__ == "__main__":
    main()
