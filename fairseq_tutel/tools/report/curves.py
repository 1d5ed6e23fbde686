"""The curves of a report: which quantities, in which section, and how one is drawn."""

import math
import re
from dataclasses import dataclass

from fairseq_tutel.tools.report.figures import Curve, line_chart
from fairseq_tutel.tools.report.section import Picture, Section
from fairseq_tutel.tools.training_log import Record, Run

HOUR = 3600  # seconds


@dataclass(frozen=True)
class Chart:
    """One quantity to draw.

    `keys` is a pattern for what fairseq logs; where it has a group, every match is a curve, which
    `part` names. `unit` labels the axis, `text` says how to read the picture; `unless_zero` leaves it out
    where all is 0.
    """

    title: str
    keys: str
    unit: str
    text: str
    part: str = ""
    log: bool = False
    from_zero: bool = False
    against_time: bool = False
    validation: bool = False
    unless_zero: bool = False


SECTIONS = {
    ("loss", "Loss and perplexity", ""): [
        Chart(
            "Perplexity", "ppl", "perplexity",
            "Per token, without balance loss: dense and MoE runs compare here.",
            log=True, against_time=True, validation=True,
        ),
        Chart(
            "Loss", "loss", "loss (bits)",
            "What is trained: that of a MoE run holds its weighted balance loss.",
            against_time=True, validation=True,
        ),
        Chart(
            "Negative log-likelihood", "nll_loss", "nll loss (bits per token)",
            "Of the targets alone. A criterion that logs none has it as its loss.",
            against_time=True, validation=True,
        ),
    ],
    ("experts", "Experts", "Averages over the MoE layers."): [
        Chart(
            "Balance loss", "moe_gate_loss", "balance loss",
            "Unweighted. The gshard loss is 1 at an even load, and E if one of E experts has all.",
            validation=True,
        ),
        Chart(
            "Gate entropy", "entropy_gating", "entropy (nats)",
            "How undecided the gate is about a token: ln E if all E experts are alike, 0 if one is sure.",
            validation=True,
        ),
        Chart(
            "Busiest expert", "moe_max_violation", "load (even shares)",
            "Its load, over all choices and before dropping: 1 if even, E if one of E experts has all.",
            validation=True,
        ),
        Chart(
            "Dead experts", "moe_dead_experts", "experts",
            "Those that no token of a micro-batch chose.", from_zero=True, validation=True,
        ),
        Chart(
            "Weights", r"expert(\d+)_weight", "mean weight",
            "What the outputs of a token's choices are multiplied with.", part="choice {}",
        ),
        Chart(
            "Dropped share", "moe_dropped", "dropped (%)",
            "Of all tokens' choices, those that found their expert full. Always 0 if dropless.",
            from_zero=True, validation=True, unless_zero=True,
        ),
        Chart(
            "Dropped share by choice", r"overflow_expert(\d+)", "dropped (%)",
            "Later choices find experts full more often, since first ones go before them.",
            part="choice {}", from_zero=True, unless_zero=True,
        ),
    ],
    ("speed", "Speed", ""): [
        Chart(
            "Tokens per second", "wps", "tokens per second",
            "Of all ranks together. Dips are validation, checkpoints or other work on the machine.",
            from_zero=True,
        ),
        Chart(
            "Row exchanges", r"all_to_all_(cpu|cuda)_time_ms", "time of a micro-batch (ms)",
            "What sending rows to experts and back took, from --record-a2a-perf-stats.",
            part="{} clock", from_zero=True,
        ),
    ],
    ("optimizer", "Optimizer", ""): [
        Chart("Learning rate", "lr", "learning rate", "As the schedule gave it.", from_zero=True),
        Chart(
            "Gradient norm", "gnorm", "gradient norm",
            "Of all parameters, before clipping. A rise that stays announces divergence.", log=True,
        ),
        Chart(
            "Clipped updates", "clip", "clipped updates (%)",
            "Near 100, --clip-norm sets the step size.", from_zero=True,
        ),
    ],
}  # fmt: skip


def curve_sections(runs: dict[str, Run]) -> list[Section]:
    """Return the sections of curves, each with the pictures that the runs have numbers for."""
    made = []
    for (name, title, text), charts in SECTIONS.items():
        section = Section(name, title, text)
        section.groups[""] = [p for chart in charts for p in pictures(chart, runs)]
        timed = [chart for chart in charts if chart.against_time]
        section.groups["Against time"] = [p for c in timed for p in pictures(c, runs, time=True)]
        made.append(section)
    return made


def pictures(chart: Chart, runs: dict[str, Run], time: bool = False) -> list[Picture]:
    """Return the picture of a chart, against updates or time; none if there is nothing to draw."""
    longest = max((s for run in runs.values() if not math.isnan(s := run.seconds)), default=0)
    unit, seconds = ("h", HOUR) if longest > 3 * HOUR else ("s", 1)
    curves = curves_of(chart, runs, seconds if time else None)
    if not curves or (chart.unless_zero and not any(any(curve.y) for curve in curves)):
        return []
    svg = line_chart(
        curves,
        f"training time ({unit})" if time else "updates",
        chart.unit,
        log=chart.log,
        from_zero=chart.from_zero,
        references=_even_entropy(runs) if chart.keys == "entropy_gating" else [],
        points=max(100, min(400, 2000 // len(curves))),
    )
    title = f"{chart.title} against {'time' if time else 'updates'}"
    return [Picture(title, chart.text, _in_words(title, curves), svg)]


def curves_of(chart: Chart, runs: dict[str, Run], seconds: float | None) -> list[Curve]:
    """Return the chart's curves; `seconds` is the unit of the time axis, None for updates."""
    curves = []
    for index, (name, run) in enumerate(runs.items()):
        measured = {"training": run.training, **(run.subsets if chart.validation else {})}
        matches = [(what, key) for what, of in measured.items() for key in _matching(chart, of)]
        for line, (what, key) in enumerate(matches):
            kept = [record for record in measured[what] if key in record.values]
            if seconds is not None:
                kept = [record for record in kept if not math.isnan(record.seconds)]
            if kept:
                x = [
                    record.update if seconds is None else record.seconds / seconds
                    for record in kept
                ]
                label = _label(chart, what, key, name if len(runs) > 1 else "")
                curves.append(Curve(label, x, [r.values[key] for r in kept], index, line))
    return curves


def _matching(chart: Chart, records: list[Record]) -> list[str]:
    keys = dict.fromkeys(key for record in records for key in record.values)
    return [key for key in keys if re.fullmatch(chart.keys, key)]


def _label(chart: Chart, what: str, key: str, run: str) -> str:
    found = re.fullmatch(chart.keys, key)
    assert found is not None
    parts = [run, what if chart.validation else "", chart.part.format(*found.groups())]
    return ", ".join(part for part in parts if part) or what


def _even_entropy(runs: dict[str, Run]) -> list[tuple[float, str]]:
    """Return the entropy of a gate that finds all E experts alike, for every E of the runs."""
    numbers = {e for run in runs.values() for e in run.experts.values()}
    return [(math.log(e), f"ln {e} = {math.log(e):.2f}") for e in sorted(numbers)]


def _in_words(title: str, curves: list[Curve]) -> str:
    ends = [
        f"{c.label} from {c.y[0]:g} at {c.x[0]:g} to {c.y[-1]:g} at {c.x[-1]:g}" for c in curves
    ]
    return f"{title}: {'; '.join(ends)}."
