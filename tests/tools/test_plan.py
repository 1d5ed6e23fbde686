"""`plan` and `tune`: what they print, write and refuse; the tables of docs/scaling.md."""

import importlib.util
import json
import os
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import forkserver
import pytest
from ports import free_port
from tool_in_process import refusal_of, tool
from workers import Workers

from fairseq_tutel.__main__ import main
from fairseq_tutel.parallel.cost import HOST, Cluster, Work, memory_bytes, step_seconds
from fairseq_tutel.parallel.machine import PRESETS, Link, Machine
from fairseq_tutel.parallel.strategy import Strategy
from fairseq_tutel.tools.measurements import Row, link_of

CLUSTER = ("--nodes", 32, "--gpus-per-node", 8, "--gpu", "h100")
MODEL = (
    "--layers", 6, "--model-dim", 2048, "--hidden-dim", 8192, "--experts", 16, "--tokens", 4096,
)  # fmt: skip


def tables(text):
    """Return the rows of every table as lists of cells, headers first."""
    return [[re.split(r" {2,}", line) for line in block.splitlines()] for block in text.split("\n\n")]


def test_plans_are_ranked_by_predicted_time(tmp_path):
    text = tool("plan", *CLUSTER, *MODEL, "--top", 5, "--output", tmp_path / "plans.json")
    assert text.startswith("256 x H100 on 32 node(s); 6 MoE layer(s) of 16 experts, ")
    _, ranking, parts, memory = tables(text.split("wrote")[0].rstrip())
    assert ranking[0] == ["P", "r", "d", "all-to-all", "step, ms", "tokens/s", "memory, GB", "fits"]
    assert len(ranking) == 1 + 5
    steps = [float(row[4]) for row in ranking[1:]]
    assert steps == sorted(steps)
    size, r, d, algorithm, step, speed, gigabytes, fits = ranking[1]
    work = Work(
        tokens=4096, model_dim=2048, hidden_dim=8192, experts=16, layers=6,
        dense_parameters=4 * 6 * 2048**2,
    )  # fmt: skip
    cluster = Cluster(nodes=32, local=8, expert_parallel_size=int(size))
    strategy = Strategy(adaptive_r=int(r), overlap=int(d), algorithm=algorithm)
    seconds = step_seconds(work, PRESETS["h100"], cluster, strategy)
    assert float(step) == pytest.approx(1e3 * seconds, abs=0.006)
    assert int(speed.replace(",", "")) == pytest.approx(256 * 4096 / seconds, rel=1e-3)
    assert float(gigabytes) == pytest.approx(
        sum(memory_bytes(work, cluster, strategy).values()) / 1e9, abs=0.006
    )
    assert fits == "yes"
    assert sum(float(row[1]) for row in parts[1:]) == pytest.approx(float(step), abs=0.05)
    assert sum(float(row[1]) for row in memory[1:]) == pytest.approx(float(gigabytes), abs=0.05)
    written = json.loads((tmp_path / "plans.json").read_text())
    assert [1e3 * plan["seconds"] for plan in written["plans"]] == pytest.approx(steps, abs=0.006)
    assert written["work"]["experts"] == 16
    assert len({(plan[0], plan[1]) for plan in ranking[1:]}) == 5


def test_plans_that_need_too_much_memory_are_marked():
    huge = ("--hidden-dim", 32768, "--model-dim", 8192, "--experts", 512, "--gpus-per-node", 8)
    (*_, last) = tables(tool("plan", *huge))[1]
    assert last[-1] == "no"


def test_zero_and_offload_make_room():
    def gigabytes(*words):
        _, ranking, _, memory = tables(tool("plan", *CLUSTER, *MODEL, *words))
        return float(ranking[1][6]), float({row[0]: row[1] for row in memory[1:]}[HOST])

    stages = [gigabytes("--zero-stage", stage) for stage in (0, 1, 2)]
    assert stages == sorted(stages, reverse=True)
    device, host = gigabytes("--zero-stage", 2, "--offload-optimizer")
    assert device < stages[2][0] and host > 0


def test_links_of_the_command_line_count():
    def best_step(*words):
        return float(tables(tool("plan", *CLUSTER, *MODEL, *words))[1][1][4])

    usual = best_step()
    assert best_step("--inter-gb-s", 400) < usual < best_step("--inter-gb-s", 5)
    assert best_step("--alpha-us", 100) > usual
    assert best_step("--intra-gb-s", 1) > usual
    assert best_step("--gpu", "a100") > usual > best_step("--top-k", 1)
    assert best_step("--dtype", "fp32") > usual
    assert best_step("--glu") > usual


def test_a_machine_s_file_gives_its_plans(tmp_path):
    PRESETS["h100"].to_json(tmp_path / "machine.json")
    from_file = tool("plan", *CLUSTER[:4], *MODEL, "--machine", tmp_path / "machine.json")
    assert from_file == tool("plan", *CLUSTER, *MODEL)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--top-k 65", "--top-k is 65; give at most --experts, 64."),
        ("--machine none.json", "none.json cannot be read as a hardware profile"),
        ("--output none/plan.json", "--output is none/plan.json; give the name"),
        ("--output /dev/full", "--output is /dev/full, which cannot be written: No space left on"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(words, sentence):
    assert refusal_of("plan", *words.split()).startswith(sentence)


SMALL = (
    "tune", "--tokens", 64, "--model-dim", 64, "--hidden-dim", 128, "--repeats", 3,
    "--max-mib", 32,
)  # fmt: skip


def test_one_rank_measures_all_but_links(tmp_path):
    path = tmp_path / "machine.json"
    text = tool(*SMALL, "--output", path)
    assert "These ranks cannot measure links; " in text
    machine = Machine.from_json(path)
    assert 1e8 < machine.memory_bytes_per_s < 1e12
    assert 1e8 < machine.flops_per_s < 1e13
    assert "x " + machine.name in tool("plan", "--machine", path, "--nodes", 2, "--dtype", "fp32")


def test_links_are_measured_from_their_shortest_and_longest_all_to_alls():
    link = Link(2e-5, 1e9)
    rows = [Row(1, 4, size, link.seconds(3, size * 3 / 4)) for size in (2**12, 2**16, 2**24)]
    found = link_of(rows)
    assert (found.alpha_s, found.bytes_per_s) == pytest.approx((2e-5, 1e9))
    with pytest.raises(ValueError, match="do not take longer with more bytes; measure larger"):
        link_of([row._replace(seconds=1.0) for row in rows])


def become_rank(rank, world, local, port):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
    }


def tune(*words):
    """Run the tool as one rank; return what it printed and how it ended."""
    sys.argv = ["fairseq_tutel", *map(str, words)]
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            main()
    except SystemExit as end:
        return printed.getvalue(), end.code
    return printed.getvalue(), None


def run_ranks(world, local, *words):
    """Return every rank's print and end."""
    ranks = Workers(world, become_rank, lambda: (world, local, free_port()), forkserver.context())
    try:
        return ranks.run(tune, *words)
    finally:
        ranks.close()


def test_two_nodes_of_two_measure_both_kinds_of_links(tmp_path):
    path = tmp_path / "machine.json"
    (printed, ended), *others = run_ranks(4, 2, *SMALL, "--output", path)
    assert ended is None
    assert others == [("", None)] * 3
    assert {tuple(row[:2]) for row in tables(printed)[1][1:-1]} == {("2", "2"), ("1", "2"), ("2", "1")}
    machine = Machine.from_json(path)
    assert machine.inter.bytes_per_s > 1e6


def test_one_node_says_that_links_between_nodes_are_not_measured():
    (printed, ended), _ = run_ranks(2, 2, *SMALL)
    assert ended is None
    assert "These ranks cannot measure links between nodes" in printed
    assert {tuple(row[:2]) for row in tables(printed)[2][1:]} == {("1", "2")}


def test_experts_that_no_ranks_share_are_refused():
    for printed, ended in run_ranks(2, 2, *SMALL, "--experts", 3):
        assert printed == ""
        assert ended.startswith("error: --experts is 3, which has no divisor in common with the 2")


def test_the_tables_of_the_page_are_those_of_the_model():
    path = Path(__file__).parents[2] / "docs" / "make_scaling.py"
    spec = importlib.util.spec_from_file_location("make_scaling", path)
    make_scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_scaling)
    page = make_scaling.PAGE.read_text()
    assert make_scaling.filled_in(page) == page
