"""One rank of the training of `benchmarks.saves`: `fairseq_tutel.train`, with saves of each form in turn.

Rank R writes a line of JSON for each save to FOLDER/saves-R.jsonl: the form, the seconds in which training
stood still, and the growth of the process's own memory.
"""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq_cli.train as loop

from benchmarks.released import anonymous_bytes
from fairseq_tutel import train
from fairseq_tutel.plugin.run_state import config_of
from fairseq_tutel.plugin.training.save import SESSION

FORMS = ("full", "sharded", "background")
NEVER = 10**9
PAUSE = 3  # updates between saves, which show how long an update takes
FOLDER, ROUNDS = "SAVES_FOLDER", "SAVES_ROUNDS"  # environment variables


class Saves:
    """Wraps the function of fairseq's loop that may save after each update.

    It returns to training after a save has begun; a save in the background has a part in later updates too.
    Between two calls, training computes an update.
    """

    def __init__(self, save: Callable[..., Any], path: Path, rounds: int) -> None:
        self._save, self._path = save, path
        self._forms = [*FORMS] * rounds
        self._background = SESSION.background
        self._left, self._ended = PAUSE, time.perf_counter()
        self._updates: dict[bool, list[float]] = {False: [], True: []}  # seconds, by whether threads write
        self._seconds, self._memory = 0.0, None

    def __call__(self, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *args: Any) -> Any:
        """Call the wrapped function; save in the form whose turn it is, if it is time."""
        begin = time.perf_counter()
        is_pending = self._memory is not None
        self._updates[is_pending].append(begin - self._ended)
        begins = not is_pending and self._left == 0
        if begins:
            self._memory = _Memory()
        cfg.dataset.validate_after_updates = 0 if begins else NEVER  # saves depend on it too
        config_of(task).moe_checkpoint = "full" if self._forms[0] == "full" else "sharded"
        SESSION.background = self._background if self._forms[0] == "background" else None
        result = self._save(cfg, trainer, task, epoch_itr, *args)
        self._left -= 1
        self._ended = time.perf_counter()
        if self._memory is not None:
            self._seconds += self._ended - begin
            if not self._background.is_pending:
                self._finish()
        return (result[0], True) if not self._forms else result

    def _finish(self) -> None:
        """Write the numbers of a save that is committed."""
        found = {
            "form": self._forms.pop(0),
            "seconds": self._seconds,
            "peak_bytes": self._memory.growth(),
            "updates": self._updates,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        self._seconds, self._memory, self._left = 0.0, None, PAUSE
        self._updates = {False: [], True: []}


class _Memory:
    """Samples the memory of this process, without pages of files, from its creation on."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise blocks that an earlier save has freed are used again
        self._before = self._highest = anonymous_bytes(os.getpid())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._highest = max(self._highest, anonymous_bytes(os.getpid()))

    def growth(self) -> int:
        """Return the largest growth in bytes, and end."""
        self._done.set()
        self._thread.join()
        return self._highest - self._before


def main() -> None:
    """Train, and measure all saves."""
    path = Path(os.environ[FOLDER]) / f"saves-{os.environ['RANK']}.jsonl"
    original = loop.train
    is_wrapped = False

    def train_epoch(*args: Any) -> Any:
        nonlocal is_wrapped
        if not is_wrapped:  # by now the plugin has wrapped the function too
            is_wrapped = True
            loop.validate_and_save = Saves(loop.validate_and_save, path, int(os.environ[ROUNDS]))
        return original(*args)

    loop.train = train_epoch
    train.main()


if __name__ == "__main__":
    main()
