"""Tests of `fairseq-tutel plan-check`, which checks a collective plan and predicts its time."""

import json
import os
from dataclasses import replace

import pytest
from tool_in_process import refusal_of, tool

from fairseq_tutel.plans.files import read_run
from fairseq_tutel.plans.format import COLLECTIVES, to_json
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plans.network import find

RING = make("ring", "all_gather", 4)


@pytest.fixture
def written(tmp_path):
    def write(plan):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(to_json(plan)))
        return path

    return write


def test_plan_check_prints_the_properties_of_a_plan(written):
    said = tool("plan-check", written(RING), "--bytes", 1000, "--alpha-us", 5, "--gb-s", 0.5)
    assert said.splitlines() == [
        f"ring all_gather: all_gather of 4 ranks, 1 chunks and 0 temporary ones; digest {RING.digest}",
        "correct in every interleaving, for any number of calls in a row",
        "steps: 52 (4 copy, 4 flush, 12 put, 16 signal, 16 wait)",
        "channels: 8",
        "depth: 4 hops in a row; rounds: 3",
        "3 of a rank's input, 3000 bytes: "
        + ", ".join(f"rank {rank} -> rank {(rank + 1) % 4}" for rank in range(4)),
        # The predicted 26 us are 4 hops of 5 us, and 6 us for 3000 bytes at 0.5 GB/s.
        "predicted: 26.0 us (1000 bytes, 5 us a hop, 0.5 GB/s a link)",
    ]


def test_plan_check_prints_the_load_of_the_network_links(written):
    plan = make("one_phase", "all_reduce", 16)
    said = tool("plan-check", written(plan), "--network", "dgx_a100:2", "--alpha-us", 1e-9)
    # Each GPU sends 8 shards to the other box over links of 25 GB/s, which determine the predicted time.
    matrix, vertices = find("dgx_a100:2").matrix, find("dgx_a100:2").vertices
    bandwidths = sorted(set(matrix[0]) - {0})
    assert bandwidths == [25, 300] and "gpu0.0" in vertices
    assert "\n8 of a rank's input, 8388608 bytes: gpu0.0 -> " in said
    assert f"predicted: {8 * 2**20 / 25e3:.1f} us (1048576 bytes, 1e-09 us a hop, dgx_a100:2)" in said
    ring = tool("plan-check", written(RING), "--network", "torus:1x4")
    assert "torus:1x4, 1 GB/s for 1 of its units)" in ring


def test_plan_check_accepts_the_name_of_a_plan_or_an_msccl_file(tmp_path):
    path, back = tmp_path / "plan.xml", tmp_path / "plan.json"
    said = tool("plan-check", "two_hops:all_to_all:6:2", "--output", path)
    assert said.endswith(f"wrote {path}\n") and 'coll="alltoall"' in path.read_text()
    again = tool("plan-check", path, "--output", back)
    assert (
        said.splitlines()[4:-2] == again.splitlines()[4:-2] == tool("plan-check", back).splitlines()[4:-1]
    )
    assert "give one of allgather" in refusal_of("plan-check", _with(path, "alltoall", "gather"))
    assert "give a name that ends with .json or .xml" in refusal_of(
        "plan-check", back, "--output", tmp_path / "plan"
    )
    for name, sentence in (
        (
            "ring",
            "ring is not a collective plan; give a FILE.json, a FILE.xml or NAME:COLLECTIVE:RANKS[:NODES]",
        ),
        ("ring:all_gather:9999", "at most 512 ranks"),
        ("ring:broadcast:4", "ring cannot make 'broadcast' plans"),
        ("hierarchical:all_reduce:4:3", "4 ranks cannot be divided equally among 3 nodes"),
    ):
        assert sentence in refusal_of("plan-check", name)


def _with(path, before, after):
    path.write_text(path.read_text().replace(before, after))
    return path


def test_plan_check_refuses_bad_plan_files_and_networks(written, tmp_path):
    bad = written(replace(RING, programs=(RING.programs[0][:1], *RING.programs[:3])))
    assert refusal_of("plan-check", bad).startswith(f"{bad}: Plan 'ring all_gather' is malformed: rank ")
    bad.write_text(json.dumps(to_json(RING) | {"ranks": 0}))
    assert refusal_of("plan-check", bad).startswith(f"{bad}: This is not a collective plan: ")
    for content in (b"{", b"\xff", b"[" * 100000):
        bad.write_bytes(content)
        assert refusal_of("plan-check", bad).startswith(f"{bad} cannot be read as a collective plan (")
    bad.unlink()
    os.mkfifo(bad)
    assert "not a regular file" in refusal_of("plan-check", bad)
    bad.unlink()
    assert "No such file" in refusal_of("plan-check", tmp_path / "none.json")
    for plan, network in ((RING, "torus:1x8"), (replace(RING, network="0123"), "torus:1x4")):
        text = refusal_of("plan-check", written(plan), "--network", network)
        assert "is not the network of the plan" in text


def test_the_tool_plans_writes_a_folder_that_a_training_run_can_use(tmp_path):
    folder = tmp_path / "plans"
    said = tool("plans", 2, 4, "--output", folder)
    found = read_run(str(folder))
    assert said.count("wrote ") == len(found) == 9
    assert {each.plan.ranks for each in found} == {2, 4}
    assert {each.plan.collective for each in found} == set(COLLECTIVES)
    ranges = [(p.plan.min_bytes, p.plan.max_bytes) for p in found if "reduce_4" in p.name]
    assert (0, 131072) in ranges and (131073, None) in ranges
    assert "not an empty folder" in refusal_of("plans", 2, "--output", folder)
