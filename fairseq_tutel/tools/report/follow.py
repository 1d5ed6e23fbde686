"""Rewrites the page of a report while its logs grow."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fairseq_tutel.tools.training_log import NoRecordError, logs_in

# Returns the text of a page that reloads itself after a number of seconds, or never for None.
Page = Callable[[float | None], str]
# Reads the logs; returns the page, and whether all runs are over.
Draw = Callable[[], tuple[Page, bool]]


def follow(paths: Sequence[Path], interval: float, draw: Draw, write: Callable[[str], None]) -> bool:
    """Write the page after each change of the logs, until all runs are over or Ctrl-C is pressed.

    The last page that is written does not reload itself.

    Args:
        paths: the runs' logs or folders, which may not exist yet.
        interval: seconds between two checks of the logs.
        draw: draws the page from the current logs.
        write: replaces the file of the page by a text.

    Returns:
        Whether a page was written.
    """
    page = None
    try:
        for page in _pages(paths, interval, draw):
            write(page(interval))
    except KeyboardInterrupt:
        pass
    finally:
        if page is not None:
            write(page(None))
    return page is not None


def _pages(paths: Sequence[Path], interval: float, draw: Draw) -> Iterator[Page]:
    """Yield a page for each change of the logs, until all runs are over."""
    seen, is_waiting = None, False
    while True:
        over = False
        try:
            now = _state_of(paths)
            if now != seen:
                page, over = draw()
                seen, is_waiting = now, False
                yield page
        except (NoRecordError, FileNotFoundError):  # not written yet, or being replaced
            if not is_waiting:
                print(f"waiting for a training record in {', '.join(map(str, paths))}", flush=True)
            is_waiting = True
        if over:
            return
        time.sleep(interval)


def _state_of(paths: Sequence[Path]) -> list[tuple[Path, int, int, int]]:
    """Return the path, inode, size in bytes and time of change in nanoseconds of each log."""
    found = [(log, log.stat()) for path in paths for log in logs_in(path)]
    return [(log, stat.st_ino, stat.st_size, stat.st_mtime_ns) for log, stat in found]
