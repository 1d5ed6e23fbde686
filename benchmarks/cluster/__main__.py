"""`python -m benchmarks.cluster`: make the cluster, measure, print tables, write JSON."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from benchmarks.cluster import network, ranks
from benchmarks.cluster.settings import Settings, add_options, settings_of
from benchmarks.cluster.tables import report


def main() -> int:
    """Measure; return 0 also where nothing may be measured, which is said."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description="Measure the MoE layer, or collectives, on an emulated cluster of network namespaces.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--json", type=Path, help="file of the results")
    arguments = parser.parse_args()
    try:
        settings = settings_of(arguments)
        if settings.collectives is not None:
            _wiring().networks(settings.collectives)
        _refuse_unwritable(arguments.json)
    except ValueError as error:
        parser.error(str(error))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    reason = network.why_not()
    if reason is not None:
        print(f"skipped: no network can be made here: {reason}")
        return 0
    return _measure(settings, arguments.json)


def _measure(settings: Settings, path: Path | None) -> int:
    begin, trouble, rows = time.monotonic(), "", []
    try:
        for found in _runs(settings):
            rows += found
    except ranks.RankError as error:
        rows += error.rows
        trouble = str(error)
    config = _config(settings, time.monotonic() - begin)
    print(", ".join(f"{name} {value}" for name, value in config.items()))
    print(report(rows))
    if trouble:
        print(f"\nnot complete: {trouble}", file=sys.stderr)
        return 1
    if path is not None:
        path.write_text(json.dumps(_by_section(config, rows), indent=1) + "\n")
    return 0


def _runs(settings: Settings) -> Iterator[list[ranks.Row]]:
    """Yield the measurements in each network."""
    if settings.collectives is None:
        with network.network(settings.nodes, settings.rate_mbit):
            yield ranks.run(settings)
        return
    wiring = _wiring()
    for topology in wiring.networks(settings.collectives):
        with wiring.wired(topology, settings.unit_mbit):
            yield ranks.run(wiring.within(settings, topology))


def _wiring() -> ModuleType:
    # It imports torch with the package, which what else is done here goes without.
    from benchmarks.cluster import wiring

    return wiring


def _by_section(config: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the file: the configuration, and the rows of every section under its name."""
    sections: dict[str, Any] = {}
    for row in rows:
        row = dict(row)
        sections.setdefault(row.pop("section"), []).append(row)
    return {"config": config, **sections}


def _config(settings: Settings, seconds: float) -> dict[str, Any]:
    return {
        **asdict(settings),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "load_before": round(_LOAD, 2),
        "took_s": round(seconds, 1),
    }


def _refuse_unwritable(path: Path | None) -> None:
    # Before minutes of measuring, not after.
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise ValueError(
            f"--json is {path}, which cannot be written ({error.strerror}); give another path."
        ) from error


def _leave(number: int, _: FrameType | None) -> None:
    # As an exception, so that the network and the ranks are removed on the way out.
    sys.exit(128 + number)


_LOAD = os.getloadavg()[0]

if __name__ == "__main__":
    sys.exit(main())
