"""Progress bars on stderr for work that may take more than a second."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from fairseq_tutel.parallel import world

DELAY_SECONDS = 1.0  # Shorter work has no progress bar.


@contextlib.contextmanager
def progress(text: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Context manager that shows a progress bar, which disappears at the end of the block.

    The block gets a function that adds an amount of finished work to the progress bar. `total` is the total
    amount of work, in the unit `unit`, such as B for bytes. There is no progress bar if stderr is not a
    terminal, or on ranks other than 0.
    """
    if not (world.is_first() and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda amount: None
        return
    from tqdm import tqdm  # Importing tqdm takes time, so the import is late.

    class Bar(tqdm):  # type: ignore[type-arg]
        # tqdm's default lock would set multiprocessing's start method. tqdm's monitor would start a thread.
        _lock = threading.RLock()
        monitor_interval = 0

    with Bar(
        desc=text, total=total, unit=unit, unit_scale=unit == "B", delay=DELAY_SECONDS, leave=False
    ) as bar:
        yield bar.update
