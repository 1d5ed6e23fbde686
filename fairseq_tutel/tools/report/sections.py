"""Makes the sections of a report, with their charts, heat maps and texts."""

import base64
import math
import re
from dataclasses import dataclass, field

from fairseq_tutel.tools.report.figures import Curve, heat_map, line_chart
from fairseq_tutel.tools.training_log import LOAD, Record, Run

HOUR = 3600  # seconds


@dataclass(frozen=True)
class Picture:
    """An SVG picture with a title, a caption, and a description for screen readers."""

    title: str
    text: str
    alt: str
    svg: str

    @property
    def address(self) -> str:
        """The picture as a data URL, so the page needs no other files."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode("ascii")


@dataclass
class Section:
    """A section of the report. `groups` has pictures by heading; the key "" means no heading."""

    name: str
    title: str
    text: str
    groups: dict[str, list[Picture]] = field(default_factory=dict)


def sections_of(runs: dict[str, Run]) -> list[Section]:
    """Return all sections of a report in the order of the page; some sections may have no pictures."""
    loss, experts, *others = curve_sections(runs)
    return [loss, experts, load_section(runs), *others]


@dataclass(frozen=True)
class Chart:
    """Describes a chart of one logged quantity in a report."""

    title: str
    keys: str  # A regular expression for logged keys; if it has a group, each match is a curve.
    unit: str  # The label of the chart's y axis.
    text: str  # Explains to the reader how to read the chart.
    part: str = ""  # The name of a curve, with {} for the match of the group in `keys`.
    log: bool = False  # True for a logarithmic y axis.
    from_zero: bool = False  # True if the y axis begins at 0.
    unless_zero: bool = False  # True to omit the chart if all logged numbers are 0.


SECTIONS = {
    ("loss", "Loss", ""): [
        Chart("Perplexity", "ppl", "perplexity",
              "Per token, without balance loss, so dense and MoE runs are comparable.", log=True),
        Chart("Accuracy", "accuracy", "correct (%)",
              "Percent of samples whose most likely class is correct. Training samples are augmented."),
        Chart("Oracle error", "oracle_error", "wrong (%)",
              "Percent of samples for which no member of the ensemble is correct."),
        Chart("Accuracy of five", "top5_accuracy", "correct (%)",
              "Percent of samples whose class is among the five most likely."),
        Chart("Loss", "loss", "loss (bits)",
              "The training objective. In a MoE run it includes the weighted balance loss."),
        Chart("Negative log-likelihood", "nll_loss", "nll loss (bits)",
              "Without balance loss and smoothing. Equal to the loss if a criterion does not log it."),
    ],
    ("experts", "Experts", "Averages over the MoE layers."): [
        Chart("Balance loss", "moe_gate_loss", "balance loss",
              "Without its weight. gshard, switch: 1 at an even load, E if one of E experts gets all."),
        Chart("Gate entropy", "entropy_gating", "entropy (nats)",
              "How undecided the gate is about a token: ln E if all are alike, 0 if one is sure."),
        Chart("Weights", r"expert(\d+)_weight", "mean weight",
              "Factors of the outputs of a token's choices.", part="choice {}"),
        Chart("Dropped share by choice", r"overflow_expert(\d+)", "dropped (%)",
              "Later choices are dropped more often, since first choices come before them.",
              part="choice {}", from_zero=True, unless_zero=True),
        Chart("Dead experts", "moe_dead_experts", "experts",
              "Experts that no token of a micro-batch chose.", from_zero=True),
        Chart("Dropped share", "moe_dropped", "dropped (%)",
              "Percent of all assignments whose expert was full. Always 0 without a capacity.",
              from_zero=True, unless_zero=True),
        Chart("Busiest expert", "moe_max_violation", "load (even shares)",
              "Its load, over all choices and before dropping: 1 if even, E if one of E experts has all."),
    ],
    ("speed", "Speed", ""): [
        Chart("Speed", "wps", "tokens or images per second",
              "All ranks together. Dips are validation, checkpoints or other processes.", from_zero=True),
        Chart("Row exchanges", r"all_to_all_(cpu|cuda)_time_ms", "time of a micro-batch (ms)",
              "Time of dispatch and combine across ranks, from --record-a2a-perf-stats.",
              part="{} clock", from_zero=True),
    ],
    ("optimizer", "Optimizer", ""): [
        Chart("Learning rate", "lr", "learning rate", "Learning rate of the schedule.", from_zero=True),
        Chart("Gradient norm", "gnorm", "gradient norm",
              "Norm of all gradients before clipping. A lasting rise often precedes divergence.", log=True),
        Chart("Clipped updates", "clip", "clipped updates (%)",
              "Near 100, --clip-norm determines the step size.", from_zero=True),
    ],
}  # fmt: skip


def curve_sections(runs: dict[str, Run]) -> list[Section]:
    """Return the sections with line charts, with one picture for each chart that has data."""
    made = []
    for (name, title, text), charts in SECTIONS.items():
        groups = {"": [p for chart in charts for p in _pictures(name, chart, runs)]}
        if name == "loss":
            groups["Against time"] = [
                p for chart in charts for p in _pictures(name, chart, runs, time=True)
            ]
        made.append(Section(name, title, text, groups))
    return made


def _pictures(section: str, chart: Chart, runs: dict[str, Run], time: bool = False) -> list[Picture]:
    """Draw a chart over updates or time, and return a list with its picture, or [] without data."""
    longest = max((s for run in runs.values() if not math.isnan(s := run.seconds)), default=0)
    x_unit, seconds = ("h", HOUR) if longest > 3 * HOUR else ("s", 1)
    has_subsets = section in ("loss", "experts") and not chart.part
    curves = _curves_of(chart, runs, has_subsets, seconds if time else None)
    if not curves or (chart.unless_zero and not any(any(curve.y) for curve in curves)):
        return []
    svg = line_chart(
        curves,
        f"training time ({x_unit})" if time else "updates",
        chart.unit,
        log=chart.log,
        from_zero=chart.from_zero,
    )
    title = f"{chart.title} against {'time' if time else 'updates'}"
    ends = [f"{c.label} from {c.y[0]:g} at {c.x[0]:g} to {c.y[-1]:g} at {c.x[-1]:g}" for c in curves]
    return [Picture(title, chart.text, f"{title}: {'; '.join(ends)}.", svg)]


def _curves_of(chart: Chart, runs: dict[str, Run], has_subsets: bool, seconds: float | None) -> list[Curve]:
    """Return a chart's curves over time in units of `seconds`, or over updates if `seconds` is None."""
    curves = []
    for index, (name, run) in enumerate(runs.items()):
        measured = {"training": run.training, **(run.subsets if has_subsets else {})}
        keys = {what: dict.fromkeys(key for r in of for key in r.values) for what, of in measured.items()}
        matches = [
            (what, match) for what in keys for key in keys[what] if (match := re.fullmatch(chart.keys, key))
        ]
        for line, (what, match) in enumerate(matches):
            points = [
                (r.update if seconds is None else r.seconds / seconds, r.values[match[0]])
                for r in measured[what]
                if match[0] in r.values and not (seconds and math.isnan(r.seconds))
            ]
            if points:
                whose = [name] * (len(runs) > 1) + [what] * has_subsets
                part = [chart.part.format(*match.groups())] * bool(chart.part)
                x, y = zip(*points, strict=True)
                curves.append(Curve(", ".join(whose + part) or what, x, y, index, line))
    return curves


LOAD_TEXT = """
One picture for each MoE layer. A row is an expert; a column is the updates from one record to the next.
White is an even share, orange is more, and violet is less. An expert whose row stays dark violet hardly
learns. The colors end at a quarter of an even share and at four.
"""


def load_section(runs: dict[str, Run]) -> Section:
    """Return the section with one heat map for each MoE layer: expert loads over updates."""
    section = Section("load", "Load of every expert", LOAD_TEXT)
    for name, run in runs.items():
        for subset, records in {"training": run.training, **run.subsets}.items():
            for key in dict.fromkeys(key for record in records for key in record.lists if LOAD in key):
                picture = _load_picture(f"{name}, {subset}", key, records)
                section.groups.setdefault(f"{name}, {subset}", []).append(picture)
    return section


def _load_picture(group: str, key: str, records: list[Record]) -> Picture:
    layer = key.removeprefix(LOAD).replace("_", " layer ")
    updates, loads_UE = zip(*((r.update, r.lists[key]) for r in records if key in r.lists), strict=True)
    last_E = loads_UE[-1]
    words = f"have {min(last_E):.2f} to {max(last_E):.2f} even shares"
    alt = f"{group}, {layer}: at update {updates[-1]} the {len(last_E)} experts {words}."
    return Picture(layer, "", alt, heat_map(updates, loads_UE))
