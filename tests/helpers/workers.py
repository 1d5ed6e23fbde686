"""Starts processes that run functions for several tests, because starting processes is slow."""

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 120


class Workers:
    """Holds `count` processes; `run` calls a function in all processes.

    Each process first calls setup(index, *setup_args()), and `setup_args` is called once for all processes.
    Processes must be able to import `setup` and every function that they run. By default a process imports
    all modules again, so `setup` can change environment variables before imports. With the context
    `forkserver.context()`, slow modules are imported already.
    """

    def __init__(
        self, count: int, setup: Callable, setup_args: Callable[[], tuple] = tuple, context: Any = None
    ):
        self.count, self.setup, self.setup_args = count, setup, setup_args
        self.context = context or multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """Call function(*args) in every process, and return the results by process index.

        Raises:
            AssertionError: A process raised an error; the message has the traceback of the first error.
            TimeoutError: A process did not answer, so `run` ended all processes.
        """
        if not self.processes:
            self._start()
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps((function, args)))
            return self._answers(function.__name__)
        except BaseException:
            self.close()  # Other processes may wait for the failed process.
            raise

    def close(self) -> None:
        """End the processes; the next `run` starts new processes."""
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        setup_args = self.setup_args()
        for index in range(self.count):
            here, there = self.context.Pipe()
            arguments = (there, self.setup, (index, *setup_args))
            process = self.context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def _answers(self, name: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + SECONDS
        while len(answers) < self.count:
            waiting = {self.pipes[i]: i for i in range(self.count) if i not in answers}
            ready = wait(list(waiting), timeout=deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"no answer to {name} from {sorted(waiting.values())}")
            for pipe in ready:
                index = waiting[pipe]
                answers[index] = self._answer(pipe, index, name)
        return [answers[i] for i in range(self.count)]

    def _answer(self, pipe: Any, index: int, name: str) -> Any:
        try:
            error, result = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self.processes[index].join()
            code = self.processes[index].exitcode
            raise AssertionError(f"{name} ended process {index}, exit code {code}") from None
        if error is not None:
            raise AssertionError(f"{name} failed in process {index}:\n{error}")
        return result


def _serve(pipe: Any, setup: Callable, setup_args: tuple) -> None:
    import torch
    from poison import poison_empty

    torch.set_num_threads(1)
    poison_empty()
    broken = _attempt(setup, setup_args)[0]
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        answer = (broken, None) if broken else _attempt(lambda r=request: _call(r), ())
        pipe.send_bytes(pickle.dumps(answer))


def _call(request: bytes) -> Any:
    from fairseq_tutel.parallel import collectives

    collectives.use(None)  # An earlier test may have used collective plans.
    function, args = pickle.loads(request)
    return function(*args)


def _attempt(function: Callable, args: tuple) -> tuple[str | None, Any]:
    try:
        return None, function(*args)
    except Exception:
        return traceback.format_exc(), None
