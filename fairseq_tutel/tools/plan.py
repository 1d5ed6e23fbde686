"""plan: ranks configurations of a model's experts on a cluster (P, r, d and all-to-all) by the cost model.

It predicts forward, backward and all-reduces at even load, without optimizer and data loading. Formulas,
sources and errors: docs/scaling.md.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fairseq_tutel.options.option import flag_of
from fairseq_tutel.planning.cost import Candidate, Work, best
from fairseq_tutel.planning.machine import PRESETS, Link, Machine
from fairseq_tutel.tools.arguments import (
    DTYPES,
    add_numbers,
    needing,
    refuse_numbers,
    refuse_output,
    writing,
)

PLOTS = (".png", ".svg", ".pdf")
# Candidates whose parts are shown side by side.
DETAILED = 3

NUMBERS = (
    ("nodes", 1, "nodes of the cluster"),
    ("gpus_per_node", 8, "ranks of a node"),
    ("layers", 12, "MoE layers of the model"),
    ("model_dim", 1024, "width of the model"),
    ("hidden_dim", 4096, "hidden dimension of one expert"),
    ("experts", 64, "experts of a layer, over all ranks"),
    ("top_k", 2, "experts of a token"),
    ("tokens", 8192, "tokens of a micro-batch on one rank"),
    ("top", 8, "candidates to show"),
)


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "plan", help="rank configurations of a model's experts on a cluster", description=__doc__
    )
    add_numbers(parser, NUMBERS)
    for flag, kind, metavar, default, text in (
        ("--gpu", str, None, "a100", f"one of {', '.join(PRESETS)} [a100]"),
        ("--machine", Path, "FILE", None, "hardware profile of tune --json, instead of --gpu"),
        ("--intra-gb-s", float, "X", None, "link of a rank within its node, GB/s"),
        ("--inter-gb-s", float, "X", None, "link of a rank to other nodes, GB/s"),
        ("--alpha-us", float, "X", None, "latency of a message to another node, microseconds"),
        ("--dtype", str, None, "bf16", f"one of {', '.join(DTYPES)} [bf16]"),
        (
            *("--dense-parameters", int, "N", None),
            "parameters outside of experts [attention: 4 x layers x model-dim squared]",
        ),
        (
            *("--zero-stage", int, "N", 0),
            "--moe-zero-stage: 1 shards the optimizer state, 2 gradients too [0]",
        ),
        ("--json", Path, "FILE", None, "write the candidates as JSON"),
        ("--plot", Path, "FILE", None, f"draw the candidates: {', '.join(PLOTS)}"),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)
    parser.add_argument("--glu", action="store_true", help="experts have three matrices")
    text = "--moe-offload-optimizer: optimizer state is in host memory"
    parser.add_argument("--offload-optimizer", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Rank the candidates and print them."""
    for path, flag in ((arguments.json, "--json"), (arguments.plot, "--plot")):
        if path:
            refuse_output(path, flag=flag)
    if arguments.plot and arguments.plot.suffix not in PLOTS:
        raise ValueError(f"--plot is {arguments.plot}; end it in one of {', '.join(PLOTS)}.")
    work = _work(arguments)
    machine = _machine(arguments)
    candidates = _best_by_degree(best(work, machine, arguments.nodes, arguments.gpus_per_node))
    shown = candidates[: arguments.top]
    text = _page(shown, work, machine)
    if arguments.plot:
        title = f"{candidates[0].cluster.world} x {machine.name}, {work.tokens} tokens a rank (predicted)"
        with needing("--plot", "report"), writing(arguments.plot, "--plot") as file:
            _draw({_name(candidate): candidate for candidate in shown}, title, file)
    if arguments.json:
        with writing(arguments.json, "--json") as file:
            file.write_text(_json(shown, work, machine), encoding="utf-8")
    print(text)
    for path in (arguments.json, arguments.plot):
        if path:
            print(f"wrote {path}")


def _work(arguments: argparse.Namespace) -> Work:
    """Return the model of the arguments."""
    refuse_numbers(arguments, NUMBERS)
    dense = arguments.dense_parameters
    if dense is None:
        dense = 4 * arguments.layers * arguments.model_dim**2
    if dense < 0:
        raise ValueError(f"--dense-parameters is {dense}; give a number from 0.")
    if arguments.zero_stage not in (0, 1, 2):
        raise ValueError(f"--zero-stage is {arguments.zero_stage}; give 0, 1 or 2.")
    return Work(
        tokens=arguments.tokens,
        model_dim=arguments.model_dim,
        hidden_dim=arguments.hidden_dim,
        experts=arguments.experts,
        top_k=arguments.top_k,
        bytes_per_element=DTYPES[arguments.dtype],
        glu=arguments.glu,
        layers=arguments.layers,
        dense_parameters=dense,
        zero_stage=arguments.zero_stage,
        offload=arguments.offload_optimizer,
    )


def _machine(arguments: argparse.Namespace) -> Machine:
    """Return the hardware profile of the arguments."""
    for key in ("intra_gb_s", "inter_gb_s"):
        value = getattr(arguments, key)
        if value is not None and not value > 0:
            raise ValueError(f"{flag_of(key)} is {value:g}; give GB/s above 0.")
    alpha = arguments.alpha_us
    if alpha is not None and not alpha >= 0:
        raise ValueError(f"--alpha-us is {alpha:g}; give microseconds from 0.")
    if arguments.machine:
        machine = Machine.from_json(arguments.machine)
    elif arguments.gpu in PRESETS:
        machine = PRESETS[arguments.gpu]
        if arguments.dtype == "fp32":  # no tensor cores, as is torch's default
            machine = replace(machine, flops_per_s=machine.gate_flops_per_s)
    else:
        raise ValueError(
            f"--gpu is {arguments.gpu}; give one of {', '.join(PRESETS)}, or a --machine FILE."
        )
    intra, inter = machine.intra, machine.inter
    if arguments.intra_gb_s is not None:
        intra = Link(intra.alpha_s, arguments.intra_gb_s * 1e9)
    if arguments.inter_gb_s is not None:
        inter = Link(inter.alpha_s, arguments.inter_gb_s * 1e9)
    if alpha is not None:
        inter = Link(alpha * 1e-6, inter.bytes_per_s)
    return replace(machine, intra=intra, inter=inter)


def _best_by_degree(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first, so the best, candidate of every (P, r)."""
    first: dict[tuple[int, int], Candidate] = {}
    for candidate in candidates:
        first.setdefault((candidate.cluster.expert_parallel_size, candidate.strategy.adaptive_r), candidate)
    return list(first.values())


def _page(candidates: Sequence[Candidate], work: Work, machine: Machine) -> str:
    """Return the tables of candidates: one line each, and the parts of the first ones."""
    with needing("plan"):
        from tabulate import tabulate

    cluster = candidates[0].cluster
    parameters = work.layers * work.experts * work.expert_parameters + work.dense_parameters
    stage = f", ZeRO stage {work.zero_stage}" if work.zero_stage else ""
    host = ", optimizer state in host memory" if work.offload else ""
    head = (
        f"{cluster.world} x {machine.name} on {cluster.nodes} node(s); {work.layers} MoE layer(s) of "
        f"{work.experts} experts, {parameters / 1e9:.2f} billion parameters{stage}{host}; predicted, for "
        f"{work.tokens} tokens a rank"
    )
    ranked = [_line(candidate, work) for candidate in candidates]
    detailed = candidates[:DETAILED]
    names = [_name(candidate) for candidate in detailed]
    parts = [
        [part, *(f"{1e3 * candidate.parts[part]:.2f}" for candidate in detailed)]
        for part in candidates[0].parts
    ]
    memory = [
        [kind, *(f"{candidate.memory[kind] / 1e9:.2f}" for candidate in detailed)]
        for kind in candidates[0].memory
    ]
    if work.offload:
        in_host = (f"{candidate.host / 1e9:.2f}" for candidate in detailed)
        memory.append(["optimizer state, in host memory", *in_host])

    def table(rows: list, header: list[str]) -> str:
        aligned = ("left", *("right",) * (len(header) - 1))
        return tabulate(rows, header, tablefmt="github", colalign=aligned, disable_numparse=True)

    ranking = table(ranked, [*"Prd", "all-to-all", "step, ms", "tokens/s", "memory, GB", "fits"])
    by_part = table(parts, ["part of the step, ms", *names])
    by_kind = table(memory, ["memory of a rank, GB", *names])
    return "\n\n".join((head, ranking, by_part, by_kind))


def _name(candidate: Candidate) -> str:
    """Return a short name of a candidate."""
    strategy, size = candidate.strategy, candidate.cluster.expert_parallel_size
    if strategy.adaptive_r == 0 or size == 1:
        return f"P={size} r={strategy.adaptive_r}"
    return f"P={size} r={strategy.adaptive_r} d={strategy.overlap} {strategy.algorithm}"


def _line(candidate: Candidate, work: Work) -> list[str]:
    strategy, size = candidate.strategy, candidate.cluster.expert_parallel_size
    sends_rows = strategy.adaptive_r > 0 and size > 1
    return [
        str(size),
        str(strategy.adaptive_r),
        str(strategy.overlap) if sends_rows else "-",
        strategy.algorithm if sends_rows else "-",
        f"{1e3 * candidate.seconds:.2f}",
        f"{candidate.cluster.world * work.tokens / candidate.seconds:,.0f}",
        f"{candidate.bytes / 1e9:.2f}",
        "yes" if candidate.fits else "no",
    ]


def _json(candidates: Sequence[Candidate], work: Work, machine: Machine) -> str:
    listed = [
        {**asdict(candidate), "seconds": candidate.seconds, "bytes": candidate.bytes}
        for candidate in candidates
    ]
    made = {"work": asdict(work), "machine": asdict(machine), "plans": listed}
    return json.dumps(made, indent=2) + "\n"


def _draw(candidates: Mapping[str, Candidate], title: str, path: Path) -> None:
    """Draw each candidate as a bar of its parts, the first on top."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    parts = list(next(iter(candidates.values())).parts)
    colors = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, 1.6 + 0.32 * len(candidates)), layout="constrained")
        axes = figure.add_subplot(xlabel="milliseconds of a step", title=title)
        names = list(candidates)
        left = [0.0] * len(names)
        for part, color in zip(parts, colors, strict=False):
            widths = [1e3 * candidates[name].parts[part] for name in names]
            axes.barh(names, widths, left=left, color=color, label=part, height=0.7)
            left = [sum(pair) for pair in zip(left, widths, strict=True)]
        for index, name in enumerate(names):
            note = "" if candidates[name].fits else ", does not fit"
            axes.annotate(
                f"{left[index]:.1f} ms, {candidates[name].bytes / 1e9:.1f} GB{note}",
                (left[index], index),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_xlim(right=1.35 * max(left))
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)
