"""What grows with the number of ranks: meetings, resumes and checkpoints, by simulated ranks.

Ranks are threads that share one store, or are gone through one after the other; the code that runs is that
of a training. Rows say what was counted (requests, reads, files), which is the same on every machine, and
seconds: of meetings by the clock, else of CPU time. docs/scaling.md has the results; `python
docs/make_scaling.py` takes them from the files in results/.

    OMP_NUM_THREADS=1 python -m benchmarks.scale --json out.json
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import torch

from benchmarks.command import parser_of, run, shown
from benchmarks.machine import facts
from benchmarks.output import Report, Row
from benchmarks.scale import checkpoints, meetings, resumes

# Rows of each section, from whether tiny sizes will do.
SECTIONS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "health check": meetings.health_checks,
    "restart": meetings.restarts,
    "elastic resume": resumes.elastic_resumes,
    "look before a resume": resumes.looks,
    "shards": checkpoints.shards,
    "ZeRO buckets": checkpoints.zero_buckets,
}


def main(words: list[str] | None = None) -> int:
    """Run the requested measurements; return the exit status."""
    parser = parser_of("scale", __doc__)
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to measure"
    )
    return run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    machine = facts(torch.device("cpu"), torch.float32)
    report = Report("scale", "", machine, shown(options), options.json)
    for section in options.sections:
        report.add(section, {}, list(SECTIONS[section](options.quick)))
    report.finish(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
