"""Free memory: MemAvailable and the limits of cgroups, from files of a made-up system."""

import pytest
import torch

from fairseq_tutel import ExpertStore
from fairseq_tutel.inference import expert_store, free_memory
from fairseq_tutel.inference.free_memory import free_bytes, host_free_bytes

MIB = 2**20
CGROUP = "sys/fs/cgroup"


def limited(limit, usage=100 * MIB, inactive=0):
    stat = f"anon 5\ninactive_file {inactive}\n"
    return {"memory.max": str(limit), "memory.current": str(usage), "memory.stat": stat}


# The process's cgroups; the files of folders; the free memory in MiB if MemAvailable is 1000 MiB.
SYSTEMS = {
    "no cgroup": ("", {}, 1000),
    "no limit": ("0::/\n", {CGROUP: limited("max")}, 1000),
    "a limit": ("0::/\n", {CGROUP: limited(300 * MIB)}, 200),
    "a large limit": ("0::/\n", {CGROUP: limited(3000 * MIB)}, 1000),
    "inactive page cache": ("0::/\n", {CGROUP: limited(300 * MIB, inactive=50 * MIB)}, 250),
    "a limit of a parent": (
        "0::/job/step\n",
        {f"{CGROUP}/job": limited(400 * MIB), f"{CGROUP}/job/step": limited(900 * MIB)},
        300,
    ),
    "a container's view": ("0::/docker/4f0c\n", {CGROUP: limited(300 * MIB)}, 200),
    "outside of the view": ("0::/../other\n", {CGROUP: limited(300 * MIB)}, 200),
    "used up": ("0::/\n", {CGROUP: limited(100 * MIB, usage=101 * MIB)}, 0),
}


def write(root, cgroups, folders, meminfo="MemTotal: 9 kB\nMemAvailable: 1024000 kB\n"):
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroups}
    files |= {f"{folder}/{name}": text for folder, own in folders.items() for name, text in own.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_smallest_of_available_memory_and_limits_is_free(tmp_path, name):
    cgroups, folders, expected = SYSTEMS[name]
    assert host_free_bytes(write(tmp_path, cgroups, folders)) == expected * MIB


def test_a_system_without_available_memory_needs_a_size(tmp_path):
    with pytest.raises(ValueError, match=r"^cache \(--moe-expert-cache\) is auto, but this system has no"):
        host_free_bytes(write(tmp_path, "", {}, "MemTotal: 9 kB\n"))


def test_ranks_of_a_node_share_its_memory(monkeypatch):
    monkeypatch.setattr(free_memory, "host_free_bytes", lambda: 600)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_bytes(torch.device("cpu")) == 600
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cpu")) == 150


def test_this_machine_has_free_memory():
    assert 0 < host_free_bytes() < 2**50


def test_an_automatic_cache_is_half_of_the_free_memory_at_the_first_fetch(monkeypatch):
    from stored import FFN, model_of

    with ExpertStore(tier="host", cache="auto") as store:
        store.add(model_of(FFN)[0].experts)
        size = store._stacks[0][1].layout.num_bytes
        monkeypatch.setattr(expert_store, "free_bytes", lambda device: 4 * size + 1)
        for experts in ([0], [1], [2], [3], [0, 1, 2, 3]):  # two of the first three are in the cache
            store.take(0, experts)
        assert (store.counters.fetches, store.counters.hits) == (5, 3)
