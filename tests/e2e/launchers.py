"""Starts fairseq-train and torchrun in new processes, and simulates nodes that leave and join a job."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from cli import ROOT, tail
from ports import free_port

STORE = (
    "import time, torch.distributed as d; "
    "s = d.TCPStore('0.0.0.0', {port}, is_master=True, wait_for_workers=False); time.sleep(10**9)"
)


class Launched(subprocess.Popen):
    """A started command with the methods of a multiprocessing.Process."""

    @property
    def exitcode(self):
        return self.poll()

    def is_alive(self):
        return self.poll() is None

    def join(self):
        self.wait()

    def kill(self):
        """Kill the command and its child processes one by one, because torchrun's ranks have separate
        sessions."""
        for pid in (*children(self.pid), self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def launch(launcher, words, log, env=None):
    """Start `python -m LAUNCHER WORDS`; append the output of this command to a log."""
    command = [sys.executable, "-m", *map(str, launcher), *map(str, words)]
    with open(log, "a") as file:
        return Launched(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip


def torchrun(ranks, *flags):
    """Return the arguments of `launch` that start fairseq-train on several ranks with torchrun."""
    own = ("--nproc_per_node", ranks, "--master_port", free_port(), *flags)
    return ("torch.distributed.run", *own, "-m", "fairseq_tutel.train")


def children(pid):
    """Return the IDs of a process's child processes."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(child) for child in found.stdout.split()]


class Cluster:
    """Two simulated nodes, each with one torchrun agent, and a process with torch's rendezvous store."""

    def __init__(self, folder, words, seconds=0.7):
        self.folder, self.words, self.port = folder, words, free_port()
        self.agents = {}
        self._environment = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SECONDS_PER_UPDATE": str(seconds)
        }  # fmt: skip
        command = [sys.executable, "-c", STORE.format(port=self.port)]
        self.store = subprocess.Popen(command)

    def start(self, node):
        self._wait_for_store()
        launcher = (
            "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", 1, "--max-restarts", 5,
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}",
            "--rdzv-conf", "is_host=0,last_call_timeout=15",
            "--local-addr", "127.0.0.1", "--monitor-interval", 1, "-m", "fairseq_tutel.train",
        )  # fmt: skip
        self.agents[node] = launch(launcher, self.words, self.folder / f"{node}.log", self._environment)

    def _wait_for_store(self):
        def listens():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        self.wait_until(listens)

    def lose(self, node):
        """Kill the torchrun agent of a node and the ranks that the agent started."""
        agent = self.agents.pop(node)
        agent.kill()
        agent.wait()

    def log(self):
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("[01].log")))

    def wait_until(self, condition, seconds=240):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, tail(self.log(), 100)
            assert all(agent.poll() in (None, 0) for agent in self.agents.values()), tail(self.log(), 100)
            time.sleep(0.2)

    def has_ended(self):
        """Return whether the torchrun agents of all nodes have ended without an error."""
        return all(agent.poll() == 0 for agent in self.agents.values())

    def close(self):
        for node in list(self.agents):
            if self.agents[node].poll() is None:
                self.lose(node)
        self.store.kill()
        self.store.wait()
