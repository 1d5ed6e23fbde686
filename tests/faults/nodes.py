"""A training of two nodes: torchrun's agent on one of them is killed, and another one joins.

A node is an agent with one rank, in processes of this machine.
"""

import re
import time
from pathlib import Path

from launchers import Cluster

from .job import Job, words_of
from .plan import Fault

SLOW = str(Path(__file__).parents[1] / "e2e" / "slow_user_dir")
# A node must start and join while the other one trains.
SECONDS_PER_UPDATE = 4.0
LAST_CALL = 8
UPDATE = re.compile(r'"num_updates": "(\d+)"')


def train(
    data: Path, save_dir: Path, flags: tuple[str, ...], updates: int, timeout: float, fault: Fault
) -> Job:
    """Run a training to its end; raise AssertionError if it ends otherwise, or no node joins.

    Args:
        data: a binarized corpus.
        save_dir: of its checkpoints.
        flags: of the trial.
        updates: where it stops.
        timeout: --moe-comm-timeout.
        fault: which node is killed, after how many updates and seconds; "store" in its detail: the store of
            the rendezvous is not in node 0's agent, which may be killed then.

    Returns:
        A job whose seconds are those from the kill to the next update.
    """
    extra = ("--user-dir", SLOW, "--disable-validation")
    words = words_of(data, save_dir, 2, flags, updates, timeout, *extra)
    cluster = Cluster(save_dir.parent, words, fault.detail == "store", SECONDS_PER_UPDATE, LAST_CALL)

    def count(text: str) -> int:
        return cluster.log().count(text)

    try:
        cluster.start(0)
        cluster.start(1)
        cluster.wait_until(lambda: max([0, *map(int, UPDATE.findall(cluster.log()))]) >= fault.when)
        time.sleep(fault.seconds)
        alone = count("training on 1 devices")
        cluster.lose(fault.rank)
        lost = time.monotonic()
        cluster.wait_until(lambda: count("training on 1 devices") > alone)
        logged = count("train_inner")
        cluster.wait_until(lambda: count("train_inner") > logged)
        seconds, both = time.monotonic() - lost, count("training on 2 devices")
        cluster.start(fault.rank)
        cluster.wait_until(cluster.has_ended)
        assert count("training on 2 devices") > both, "no node has joined"
    finally:
        cluster.close()
    codes = [agent.poll() for _, agent in sorted(cluster.agents.items())]
    return Job(exit_codes=codes, logs=[cluster.log()], fired=True, hung=[], seconds=seconds)
