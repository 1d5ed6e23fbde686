"""Rewrites the page of a report while its logs grow."""

import contextlib
import time
from collections.abc import Callable, Sequence
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
    page, seen, is_over = None, None, False
    print(f"following {', '.join(map(str, paths))}; press Ctrl-C to end", flush=True)
    try:
        while not is_over:
            # An unfinished or missing log: the first record may not be written yet.
            with contextlib.suppress(NoRecordError, FileNotFoundError):
                now = [(file, file.stat()) for path in paths for file in logs_in(path)]
                if now != seen:
                    page, is_over = draw()
                    seen = now
                    write(page(interval))
            if not is_over:
                time.sleep(interval)
    except KeyboardInterrupt:
        pass
    finally:
        if page is not None:
            write(page(None))
    return page is not None
