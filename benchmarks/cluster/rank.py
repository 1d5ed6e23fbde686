"""One rank: joins the others, runs the requested measurements, and on rank 0 writes them row by row."""

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.cluster.collectives import collectives
from benchmarks.cluster.delay import delayed_messages
from benchmarks.cluster.messages import all_to_alls, links
from benchmarks.cluster.overlap import overlaps
from benchmarks.cluster.plans import plans
from benchmarks.cluster.settings import Settings
from benchmarks.cluster.training import training
from benchmarks.cluster.tuning import tuning

SECTIONS = {
    "links": links,
    "a2a": all_to_alls,
    "overlap": overlaps,
    "tuner": tuning,
    "training": training,
    "collectives": collectives,
    "plans": plans,
}


def main() -> None:
    """Run as `python -m benchmarks.cluster.rank SETTINGS FILE` with torchrun's variables set."""
    settings = Settings.from_json(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.limit_s))
    with Path(sys.argv[2]).open("a") as file, delayed_messages(1e-6 * settings.delay_us, settings.local):
        for row in measured(settings):
            if dist.get_rank() == 0:
                file.write(json.dumps(row) + "\n")
                file.flush()
    # No rank exits while another still waits for a message.
    dist.barrier()
    dist.destroy_process_group()


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the rows of all sections that are asked for."""
    for name in settings.sections:
        yield from SECTIONS[name](settings)


if __name__ == "__main__":
    main()
