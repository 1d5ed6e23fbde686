"""Tests of `fairseq-tutel plan`, which ranks parallel configurations by predicted time."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tool_in_process import refusal_of, tool

from fairseq_tutel.parallel.cost import HOST, Cluster, Work, memory_bytes, step_seconds
from fairseq_tutel.parallel.machine import PRESETS
from fairseq_tutel.parallel.strategy import Strategy

CLUSTER = ("--nodes", 32, "--gpus-per-node", 8, "--gpu", "h100")
MODEL = (
    "--layers", 6, "--model-dim", 2048, "--hidden-dim", 8192, "--experts", 16, "--tokens", 4096,
)  # fmt: skip


def tables(text):
    """Return all tables in a text; a table is a list of rows, and a row is a list of cells."""
    return [[re.split(r" {2,}", line) for line in block.splitlines()] for block in text.split("\n\n")]


def test_plan_ranks_configurations_by_predicted_time(tmp_path):
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


def test_plan_marks_configurations_that_need_too_much_memory():
    huge = ("--hidden-dim", 32768, "--model-dim", 8192, "--experts", 512, "--gpus-per-node", 8)
    (*_, last) = tables(tool("plan", *huge))[1]
    assert last[-1] == "no"


def test_zero_and_offload_reduce_the_predicted_gpu_memory():
    def gigabytes(*words):
        _, ranking, _, memory = tables(tool("plan", *CLUSTER, *MODEL, *words))
        return float(ranking[1][6]), float({row[0]: row[1] for row in memory[1:]}[HOST])

    stages = [gigabytes("--zero-stage", stage) for stage in (0, 1, 2)]
    assert stages == sorted(stages, reverse=True)
    device, host = gigabytes("--zero-stage", 2, "--offload-optimizer")
    assert device < stages[2][0] and host > 0


def test_options_of_the_cluster_and_the_model_change_the_predicted_time():
    def best_step(*words):
        return float(tables(tool("plan", *CLUSTER, *MODEL, *words))[1][1][4])

    usual = best_step()
    assert best_step("--inter-gb-s", 400) < usual < best_step("--inter-gb-s", 5)
    assert best_step("--gpu", "a100") > usual > best_step("--top-k", 1)
    assert best_step("--dtype", "fp32") > usual
    assert best_step("--glu") > usual


def test_the_output_file_of_plan_can_be_used_as_hardware_profile(tmp_path):
    path = tmp_path / "plans.json"
    text = tool("plan", *CLUSTER, *MODEL, "--inter-gb-s", 45, "--output", path)
    assert text == tool("plan", *CLUSTER[:4], *MODEL, "--machine", path) + f"wrote {path}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--top-k 65", "--top-k is 65; give at most --experts, 64."),
        ("--machine none.json", "none.json cannot be read as a hardware profile"),
        ("--output none/plan.json", "--output is none/plan.json; give the name"),
        ("--output /dev/full", "--output is /dev/full, which cannot be written: No space left on"),
    ],
)
def test_plan_refuses_bad_values_with_one_sentence(words, sentence):
    assert refusal_of("plan", *words.split()).startswith(sentence)


def test_the_tables_of_the_scaling_page_match_the_cost_model():
    path = Path(__file__).parents[2] / "docs" / "make_scaling.py"
    spec = importlib.util.spec_from_file_location("make_scaling", path)
    make_scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_scaling)
    page = make_scaling.PAGE.read_text()
    assert make_scaling.filled_in(page) == page
