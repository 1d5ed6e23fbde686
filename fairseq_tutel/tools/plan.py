"""The tool `plan` sorts configurations of a model's experts on a cluster by their predicted time.

A configuration has four values: P (the EP group size), r (the number of ranks to which each row is sent), d
(the number of chunks for overlap) and the all-to-all algorithm. With r = 0, weights are gathered and no row
is sent. The predicted time includes forward, backward and all-reduces at even load, but not optimizer and
data loading. For options, formulas, sources and errors, see docs/scaling.md.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fairseq_tutel.option import flag_of
from fairseq_tutel.parallel.cost import Candidate, Work, best
from fairseq_tutel.parallel.machine import PRESETS, Machine
from fairseq_tutel.tools.arguments import DTYPES, above_0, aligned, at_least, refuse_output, writing
from fairseq_tutel.tools.parser import add_output

DETAILED = 3  # The output has details of this number of configurations.

NUMBERS = (
    ("nodes", 1, "number of nodes in the cluster"),
    ("gpus_per_node", 8, "number of ranks per node"),
    ("layers", 12, "number of MoE layers"),
    ("model_dim", 1024, "model dimension"),
    ("hidden_dim", 4096, "hidden dimension of one expert"),
    ("experts", 64, "number of experts per layer, over all ranks"),
    ("top_k", 2, "number of experts per token"),
    ("tokens", 8192, "number of tokens per micro-batch and rank"),
    ("top", 8, "number of candidates to show"),
)


def add_to(tools: Any) -> None:
    """Add the tool `plan` as a subcommand of `python -m fairseq_tutel`."""
    example = "--nodes 4 --gpus-per-node 8 --gpu h100 --experts 64"
    parser = tools.add_parser("plan", description=__doc__, example=example)
    for key, default, text in NUMBERS:
        facts: dict[str, Any] = {"type": at_least(1), "default": default, "metavar": "N"}
        parser.add_argument(flag_of(key), help=f"{text} [{default}]", **facts)
    zero = "value of --moe-zero-stage: 1 shards the optimizer state, 2 also shards gradients [0]"
    dense = "number of parameters outside of experts [attention: 4 x layers x model-dim squared]"
    for flag, kind, metavar, text in (
        ("--machine", Path, "FILE", "hardware profile that an earlier --output wrote, instead of --gpu"),
        ("--inter-gb-s", above_0, "X", "bandwidth of a rank's link to other nodes, in GB/s"),
        ("--dense-parameters", at_least(0), "N", dense),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.add_argument("--gpu", default="a100", choices=PRESETS, help="GPU of the cluster [a100]")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="dtype of the experts [bf16]")
    parser.add_argument("--zero-stage", type=int, default=0, choices=(0, 1, 2), help=zero)
    parser.add_argument("--glu", action="store_true", help="experts are gated FFNs with three matrices")
    text = "plan for --moe-offload-optimizer, which keeps the optimizer state in host memory"
    parser.add_argument("--offload-optimizer", action="store_true", help=text)
    add_output(parser, "write the candidates and the hardware profile as JSON to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Sort the configurations of experts on a cluster by predicted time, and print the best."""
    if arguments.output:
        refuse_output(arguments.output, overwrite=arguments.overwrite)
    work, machine = _work(arguments), _machine(arguments)
    best_of: dict[tuple[int, int], Candidate] = {}  # The fastest candidate for each P and r.
    for candidate in best(work, machine, arguments.nodes, arguments.gpus_per_node):
        key = candidate.cluster.expert_parallel_size, candidate.strategy.adaptive_r
        best_of.setdefault(key, candidate)
    shown = list(best_of.values())[: arguments.top]
    print(_page(shown, work, machine))
    if arguments.output:
        listed = {"work": asdict(work), "machine": asdict(machine), "plans": list(map(asdict, shown))}
        with writing(arguments.output) as file:
            file.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {arguments.output}")


def _work(arguments: argparse.Namespace) -> Work:
    if arguments.top_k > arguments.experts:
        raise ValueError(f"--top-k is {arguments.top_k}; give at most --experts, {arguments.experts}.")
    dense = arguments.dense_parameters
    if dense is None:
        dense = 4 * arguments.layers * arguments.model_dim**2
    names = ("tokens", "model_dim", "hidden_dim", "experts", "top_k", "glu", "layers", "zero_stage")
    return Work(
        **{name: getattr(arguments, name) for name in names},
        bytes_per_element=DTYPES[arguments.dtype],
        dense_parameters=dense,
        offload=arguments.offload_optimizer,
    )


def _machine(arguments: argparse.Namespace) -> Machine:
    if arguments.machine:
        machine = Machine.from_json(arguments.machine)
    else:
        machine = PRESETS[arguments.gpu]
        if arguments.dtype == "fp32":  # By default, torch uses no tensor cores for fp32.
            machine = replace(machine, flops_per_s=machine.gate_flops_per_s)
    if arguments.inter_gb_s:
        machine = replace(machine, inter=replace(machine.inter, bytes_per_s=arguments.inter_gb_s * 1e9))
    return machine


def _page(candidates: Sequence[Candidate], work: Work, machine: Machine) -> str:
    """Return the output of the tool `plan`: a table of the candidates, and details of the first."""
    cluster = candidates[0].cluster
    parameters = work.layers * work.experts * work.expert_parameters + work.dense_parameters
    head = (
        f"{cluster.world} x {machine.name} on {cluster.nodes} node(s); {work.layers} MoE layer(s) of "
        f"{work.experts} experts, {parameters / 1e9:.2f} billion parameters; predicted, for "
        f"{work.tokens} tokens a rank"
    )
    rows = [["P", "r", "d", "all-to-all", "step, ms", "tokens/s", "memory, GB", "fits"]]
    rows += [
        [
            *_choice(candidate),
            f"{1e3 * candidate.seconds:.2f}",
            f"{candidate.cluster.world * work.tokens / candidate.seconds:,.0f}",
            f"{candidate.bytes / 1e9:.2f}",
            "yes" if candidate.fits else "no",
        ]
        for candidate in candidates
    ]
    detailed = candidates[:DETAILED]
    names = ["P={} r={} d={} {}".format(*_choice(candidate)) for candidate in detailed]
    parts = [["part of the step, ms", *names]]
    parts += [[part, *(f"{1e3 * c.parts[part]:.2f}" for c in detailed)] for part in candidates[0].parts]
    memory = [["memory of a rank, GB", *names]]
    memory += [[kind, *(f"{c.memory[kind] / 1e9:.2f}" for c in detailed)] for kind in candidates[0].memory]
    return "\n\n".join((head, *map(aligned, (rows, parts, memory))))


def _choice(candidate: Candidate) -> tuple[str, str, str, str]:
    """Return a configuration's P, r, d and all-to-all algorithm as strings."""
    strategy, size = candidate.strategy, candidate.cluster.expert_parallel_size
    sends_rows = strategy.adaptive_r > 0 and size > 1
    d, algorithm = (str(strategy.overlap), strategy.algorithm) if sends_rows else ("-", "-")
    return str(size), str(strategy.adaptive_r), d, algorithm
