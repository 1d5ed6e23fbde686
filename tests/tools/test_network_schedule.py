"""Tests of `fairseq-tutel schedule`, which computes a collective plan for a network."""

import json

import pytest
from tool_in_process import refusal_of, tool

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.format import from_json
from fairseq_tutel.plans.network import find


def test_schedule_prints_the_optimum_and_the_limiting_network_cut_and_the_spanning_trees():
    text = tool("schedule", "dgx_a100:2")
    assert "T* = 3/65 (bytes of a shard / GB/s), algbw 346.667 GB/s" in text
    assert "cut: 15 shard(s) leave gpu0.1, gpu0.2, gpu0.3, gpu0.4, … (15 GPUs) over 325 GB/s" in text
    assert "trees: k = 1 per root, 16 different ones, depth 2; U = 7/150 trees a GB/s; T = 7/150" in text
    assert text.endswith("algbw 342.857 GB/s, 1.1 % over the optimum\n")


@pytest.mark.parametrize(
    ("words", "least", "chunks"),
    [
        # The 24 chunks are 4 shards x 3 slices x 2 trees.
        (
            ("all_reduce", "--trees", 2, "--slices", 3),
            "optimum of a reduce-scatter and an all-gather: T* = 3 (",
            24,
        ),
        (("reduce_scatter", "--trees", 1), "arrive as sums in", 1),
    ],
)
def test_the_plan_and_the_network_that_schedule_writes_can_be_read(tmp_path, words, least, chunks):
    files = {flag: tmp_path / f"{flag}.json" for flag in ("--output", "--output-network")}
    flags = [word for pair in files.items() for word in pair]
    text = tool("schedule", "torus:1x4", "--collective", *words, *flags)
    assert least in text and text.endswith(f"wrote {files['--output-network']}\n")
    plan = from_json(json.loads(files["--output"].read_text()))
    assert (plan.collective, plan.ranks, plan.chunks) == (words[0], 4, chunks)
    assert plan.network == find(str(files["--output-network"])).digest == find("torus:1x4").digest
    assert check(plan).depth > 0
    again = tool("schedule", files["--output-network"], "--collective", *words)
    assert again == text.partition("wrote")[0]


REFUSED = {
    "GPUs": (("torus:1x257",), "torus:1x257 has 257 GPUs; give a network of at most 256."),
    "topology": (("dgx",), "dgx is not a network; give the path of a JSON file or one of dgx_a100:BOXES, "),
    "kind": (("torus:1x4", "--output", "x.xml"), "--output is x.xml; give a name that ends with .json."),
    "one file": (
        ("torus:1x4", "--output", "x.json", "--output-network", "x.json"),
        "--output and --output-network are both x.json; give two files.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schedule_refuses_bad_values_with_one_sentence(case):
    words, sentence = REFUSED[case]
    assert refusal_of("schedule", *words).startswith(sentence)
