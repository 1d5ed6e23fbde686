"""plan: say how to run a model's experts on a cluster: P, r, d and the all-to-all, by the cost model.

A prediction from links and arithmetic, with even load, of forward, backward and all-reduces; the optimizer
and the data are not in it. Formulas, sources and how far off it is: docs/scaling.md.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fairseq_tutel.moe.options import flag_of
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
# Plans whose parts are shown side by side.
DETAILED = 3

NUMBERS = (
    ("nodes", 1, "of the cluster"),
    ("gpus_per_node", 8, "ranks of a node"),
    ("layers", 12, "MoE layers of the model"),
    ("model_dim", 1024, "width of the model"),
    ("hidden_dim", 4096, "hidden dimension of one expert"),
    ("experts", 64, "of a layer, over all ranks"),
    ("top_k", 2, "experts of a token"),
    ("tokens", 8192, "of a micro-batch on one rank"),
    ("top", 8, "plans to show"),
)


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "plan", help="predict how to run a model's experts on a cluster", description=__doc__
    )
    add_numbers(parser, NUMBERS)
    parser.add_argument("--gpu", default="a100", help=f"one of {', '.join(PRESETS)} [a100]")
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="instead of --gpu: from tune --measure --json"
    )
    parser.add_argument("--intra-gb-s", type=float, metavar="X", help="of a rank in its node, GB/s")
    parser.add_argument("--inter-gb-s", type=float, metavar="X", help="of a rank to others, GB/s")
    parser.add_argument(
        "--alpha-us", type=float, metavar="X", help="of a message to another node, microseconds"
    )
    parser.add_argument("--glu", action="store_true", help="experts of three matrices")
    parser.add_argument("--dtype", default="bf16", help=f"one of {', '.join(DTYPES)} [bf16]")
    text = "all that is not experts [attention of the MoE layers: 4 x layers x model-dim squared]"
    parser.add_argument("--dense-parameters", type=int, metavar="N", help=text)
    text = "of --moe-zero-stage: 1 cuts the optimizer's state, 2 gradients too [0]"
    parser.add_argument("--zero-stage", type=int, default=0, metavar="N", help=text)
    text = "as --moe-offload-optimizer: the optimizer's state is in host memory"
    parser.add_argument("--offload-optimizer", action="store_true", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plans here too")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw them here: {', '.join(PLOTS)}"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the plans that the command line asks for."""
    for path, flag in ((arguments.json, "--json"), (arguments.plot, "--plot")):
        if path:
            refuse_output(path, flag=flag)
    if arguments.plot and arguments.plot.suffix not in PLOTS:
        raise ValueError(f"--plot is {arguments.plot}; end it in one of {', '.join(PLOTS)}.")
    work = _work(arguments)
    machine = _machine(arguments)
    plans = _ways(best(work, machine, arguments.nodes, arguments.gpus_per_node))
    shown = plans[: arguments.top]
    text = _page(shown, work, machine)
    if arguments.plot:
        title = (
            f"{plans[0].cluster.world} x {machine.name}, {work.tokens} tokens a rank (predicted)"
        )
        with needing("--plot", "report"), writing(arguments.plot, "--plot") as file:
            _draw({_name(plan): plan for plan in shown}, title, file)
    if arguments.json:
        with writing(arguments.json, "--json") as file:
            file.write_text(_json(shown, work, machine), encoding="utf-8")
    print(text)
    for path in (arguments.json, arguments.plot):
        if path:
            print(f"wrote {path}")


def _work(arguments: argparse.Namespace) -> Work:
    """Return the model of the command line."""
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
    """Return the machine of the command line, with the links that it gives."""
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
        if arguments.dtype == "fp32":  # without tensor cores, as torch computes it by default
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


def _ways(plans: Sequence[Candidate]) -> list[Candidate]:
    """Return the first, so the best, plan of every (P, r), in their order."""
    first: dict[tuple[int, int], Candidate] = {}
    for plan in plans:
        first.setdefault((plan.cluster.expert_parallel_size, plan.strategy.adaptive_r), plan)
    return list(first.values())


def _page(plans: Sequence[Candidate], work: Work, machine: Machine) -> str:
    """Return the tables of ranked plans: all in a line each, the first ones by their parts."""
    with needing("plan"):
        from tabulate import tabulate

    cluster = plans[0].cluster
    parameters = work.layers * work.experts * work.expert_parameters + work.dense_parameters
    stage = f", ZeRO stage {work.zero_stage}" if work.zero_stage else ""
    host = ", optimizer state in host memory" if work.offload else ""
    head = (
        f"{cluster.world} x {machine.name} on {cluster.nodes} node(s); {work.layers} MoE layer(s) of "
        f"{work.experts} experts, {parameters / 1e9:.2f} billion parameters{stage}{host}; predicted, for "
        f"{work.tokens} tokens a rank"
    )
    ranked = [_line(plan, work) for plan in plans]
    detailed = plans[:DETAILED]
    names = [_name(plan) for plan in detailed]
    parts = [
        [part, *(f"{1e3 * plan.parts[part]:.2f}" for plan in detailed)] for part in plans[0].parts
    ]
    memory = [
        [kind, *(f"{plan.memory[kind] / 1e9:.2f}" for plan in detailed)] for kind in plans[0].memory
    ]
    if work.offload:
        in_host = (f"{plan.host / 1e9:.2f}" for plan in detailed)
        memory.append(["optimizer state, in host memory", *in_host])

    def table(rows: list, header: list[str]) -> str:
        aligned = ("left", *("right",) * (len(header) - 1))
        return tabulate(rows, header, tablefmt="github", colalign=aligned, disable_numparse=True)

    ranking = table(ranked, [*"Prd", "all-to-all", "step, ms", "tokens/s", "memory, GB", "fits"])
    by_part = table(parts, ["part of the step, ms", *names])
    by_kind = table(memory, ["memory of a rank, GB", *names])
    return "\n\n".join((head, ranking, by_part, by_kind))


def _name(plan: Candidate) -> str:
    """Return a plan's choices in a few letters."""
    strategy, size = plan.strategy, plan.cluster.expert_parallel_size
    if strategy.adaptive_r == 0 or size == 1:
        return f"P={size} r={strategy.adaptive_r}"
    return f"P={size} r={strategy.adaptive_r} d={strategy.overlap} {strategy.algorithm}"


def _line(plan: Candidate, work: Work) -> list[str]:
    strategy, size = plan.strategy, plan.cluster.expert_parallel_size
    travels = strategy.adaptive_r > 0 and size > 1
    return [
        str(size),
        str(strategy.adaptive_r),
        str(strategy.overlap) if travels else "-",
        strategy.algorithm if travels else "-",
        f"{1e3 * plan.seconds:.2f}",
        f"{plan.cluster.world * work.tokens / plan.seconds:,.0f}",
        f"{plan.bytes / 1e9:.2f}",
        "yes" if plan.fits else "no",
    ]


def _json(plans: Sequence[Candidate], work: Work, machine: Machine) -> str:
    listed = [{**asdict(plan), "seconds": plan.seconds, "bytes": plan.bytes} for plan in plans]
    made = {"work": asdict(work), "machine": asdict(machine), "plans": listed}
    return json.dumps(made, indent=2) + "\n"


def _draw(plans: Mapping[str, Candidate], title: str, path: Path) -> None:
    """Write a picture of the plans, each a bar of its parts, the first on top."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    parts = list(next(iter(plans.values())).parts)
    colors = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, 1.6 + 0.32 * len(plans)), layout="constrained")
        axes = figure.add_subplot(xlabel="milliseconds of a step", title=title)
        names = list(plans)
        left = [0.0] * len(names)
        for part, color in zip(parts, colors, strict=False):
            widths = [1e3 * plans[name].parts[part] for name in names]
            axes.barh(names, widths, left=left, color=color, label=part, height=0.7)
            left = [sum(pair) for pair in zip(left, widths, strict=True)]
        for index, name in enumerate(names):
            note = "" if plans[name].fits else ", does not fit"
            axes.annotate(
                f"{left[index]:.1f} ms, {plans[name].bytes / 1e9:.1f} GB{note}",
                (left[index], index),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_xlim(right=1.35 * max(left))
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)
