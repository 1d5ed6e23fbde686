"""The available host memory is limited by MemAvailable and by cgroups (version 2)."""

import pytest

from fairseq_tutel.parallel.host_memory import available

MIB = 2**20
TWO = "sys/fs/cgroup"


def version_2(limit, inactive=0):
    stat = f"anon 5\ninactive_file {inactive}\n"
    return {"memory.max": str(limit), "memory.current": str(100 * MIB), "memory.stat": stat}


# Each entry has the cgroups, the files in their folders, and the available MiB; MemAvailable is 1000 MiB.
SYSTEMS = {
    "no limit": ("0::/\n", {TWO: version_2("max")}, 1000),
    "inactive page cache": ("0::/\n", {TWO: version_2(300 * MIB, inactive=50 * MIB)}, 250),
    "a limit of a parent": (
        "0::/job/step\n",
        {f"{TWO}/job": version_2(400 * MIB), f"{TWO}/job/step": version_2(900 * MIB)},
        300,
    ),
    "a container's view": ("0::/docker/4f0c\n", {TWO: version_2(300 * MIB)}, 200),
    "used up": ("0::/\n", {TWO: version_2(99 * MIB)}, 0),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_cgroup_limits_reduce_the_available_host_memory(tmp_path, name):
    cgroups, folders, expected = SYSTEMS[name]
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1024000 kB\n", "proc/self/cgroup": cgroups}
    files |= {f"{folder}/{name}": text for folder, own in folders.items() for name, text in own.items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available(tmp_path) == expected * MIB
