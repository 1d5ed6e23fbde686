"""report: draw training curves and expert loads of one or several runs as one HTML page.

Each run is given as a log of --log-format json (a --log-file, a captured output or hydra_train.log), or as
a --save-dir that contains such a log. The curves of several runs are drawn in the same charts.
"""

# ruff: noqa: RUF001 - dashes and crosses are meant

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fairseq_tutel import __version__
from fairseq_tutel.tools.arguments import needing, refuse_output, writing
from fairseq_tutel.tools.parser import add_output
from fairseq_tutel.tools.training_log import Record, Run, default_names, find_log, join, units_of

NOTHING = "–"


def add_to(tools: Any) -> None:
    """Add this tool as a subcommand of `python -m fairseq_tutel`."""
    example = "SAVE/dense SAVE/moe --output compare.html"
    parser = tools.add_parser("report", description=__doc__, example=example)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a log or a --save-dir")
    add_output(parser, "the page to write", "report.html")
    text = "name of a run; give the flag once per run, in order [the differing parts of the paths]"
    parser.add_argument("--name", action="append", dest="names", metavar="NAME", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Read the logs of the runs, and write the report as an HTML page."""
    output = arguments.output
    refuse_output(output, overwrite=arguments.overwrite)
    names = _names(arguments.names, arguments.runs)
    logs = {name: find_log(path) for name, path in zip(names, arguments.runs, strict=True)}
    files = {name: list(map(str, of)) for name, (_, of) in logs.items()}
    text = _page({name: join(log) for name, (log, _) in logs.items()}, files)
    with writing(output) as file:
        file.write_text(text, encoding="utf-8")
    print(f"wrote {output}")


def _names(names: list[str] | None, paths: list[Path]) -> list[str]:
    """Return a unique name for each run."""
    names = default_names(paths) if names is None else names
    if len(names) != len(paths):
        raise ValueError(
            f"--name is given {len(names)} time(s) for {len(paths)} run(s); give it once for each run."
        )
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"two runs are named {repeated[0]}; give different names with --name, or remove a run."
        )
    return names


def _page(runs: dict[str, Run], files: dict[str, list[str]]) -> str:
    """Return the HTML text of the report; `files` are the log files of each run."""
    with needing("report", "report"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        from fairseq_tutel.tools.report.sections import sections_of
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("report.html.j2").render(
        rows=summary(runs),
        sections=[section for section in sections_of(runs) if any(section.groups.values())],
        runs=runs,
        files=files,
        version=__version__,
    )


# Quality measures of a model: the key in the log, its name, and the function that selects the best value.
PERPLEXITY: Any = ("ppl", "perplexity", min)
ACCURACY: Any = ("accuracy", "accuracy (%)", max)


def summary(runs: dict[str, Run]) -> list[dict[str, str]]:
    """Return the rows of the summary table, one dictionary from heading to cell for each run."""
    records = [r for run in runs.values() for of in (run.training, *run.subsets.values()) for r in of]
    logged = {key for record in records for key in record.values}
    qualities = [quality for quality in (PERPLEXITY, ACCURACY) if quality[0] in logged] or [PERPLEXITY]
    units = units_of(runs.values()).capitalize()
    return [_summary_row(name, run, qualities, units) for name, run in runs.items()]


def _summary_row(name: str, run: Run, qualities: Sequence[Any], units: str) -> dict[str, str]:
    """Return one run's row of the summary table, with validation values of one data subset."""
    subset = "valid" if "valid" in run.subsets else next(iter(run.subsets), "valid")
    suffix = "" if subset == "valid" else f" ({subset})"
    speeds = [speed for _, speed in _finite(run.training, "wps")]
    speeds = speeds[1:] or speeds  # the first updates warm up
    row = {"Run": name, "Updates": f"{run.last_update:,}"}
    for key, quality, best_of in qualities:
        values = _finite(run.subsets.get(subset, []), key)
        best = best_of(values, key=lambda point: point[1], default=None)
        row |= {
            f"Training {quality}, last": _last(_finite(run.training, key)),
            f"Validation {quality}, last": _last(values) + suffix,
            f"Validation {quality}, best": (
                NOTHING if best is None else f"{best[1]:.2f} at update {best[0]:,}{suffix}"
            ),
        }
    layers = Counter(run.experts.values())
    is_moe = any("moe_gate_loss" in record.values for record in run.training)
    listed = ", ".join(f"{count} × {experts}" for experts, count in layers.items())
    return row | {
        f"{units} per second, median": f"{median(speeds):,.0f}" if speeds else NOTHING,
        "Training time": duration(run.seconds),
        "MoE layers × experts": listed or ("not logged" if is_moe else "none"),
        "Ranks": ", then ".join(map(str, run.ranks)) or NOTHING,
    }


def duration(seconds: float) -> str:
    """Return a number of seconds as text in hours and minutes, or in minutes and seconds."""
    if math.isnan(seconds):
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _finite(records: list[Record], key: str) -> list[tuple[int, float]]:
    """Return the pairs (update, value) of all records in which the value of `key` is finite."""
    points = [(record.update, record.values.get(key, math.nan)) for record in records]
    return [(update, value) for update, value in points if math.isfinite(value)]


def _last(points: list[tuple[int, float]]) -> str:
    return f"{points[-1][1]:.2f}" if points else NOTHING
