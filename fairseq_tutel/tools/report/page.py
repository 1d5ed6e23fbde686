"""The tool `report` draws training curves and expert loads of one or several runs as one HTML page.

A run is given as a log of --log-format json (a --log-file, a captured output or hydra_train.log), or as a
--save-dir with such a log. The curves of several runs are drawn in the same charts.
"""

# ruff: noqa: RUF001 - The page contains dashes and crosses.

import argparse
import math
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from fairseq_tutel.tools.arguments import refuse_output, template_of, writing
from fairseq_tutel.tools.parser import add_output
from fairseq_tutel.tools.training_log import Record, Run, find_log, join

NOTHING = "–"


def add_to(tools: Any) -> None:
    """Add the tool `report` as a subcommand of `python -m fairseq_tutel`."""
    example = "SAVE/dense SAVE/moe --output compare.html"
    parser = tools.add_parser("report", description=__doc__, example=example)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a log or a --save-dir")
    add_output(parser, "the page to write", "report.html")
    text = "name of a run; give the flag once per run, in order [the paths]"
    parser.add_argument("--name", action="append", dest="names", metavar="NAME", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Read the logs of the runs, and write the report as an HTML page."""
    output, paths = arguments.output, arguments.runs
    refuse_output(output, overwrite=arguments.overwrite)
    page = draw(arguments.names, paths)
    with writing(output) as file:
        file.write_text(page, encoding="utf-8")
    print(f"wrote {output}")


def draw(names: list[str] | None, paths: list[Path]) -> str:
    """Return the report of runs as an HTML page; `paths` are logs, or folders that contain a log.

    `names` are the names of the runs. By default, these are the paths.
    """
    from fairseq_tutel.tools.report.sections import sections_of

    names = _names(names, paths)
    logs = {name: find_log(path) for name, path in zip(names, paths, strict=True)}
    runs = {name: join(log) for name, (log, _) in logs.items()}
    files = {name: file for name, (_, file) in logs.items()}
    sections = [section for section in sections_of(runs) if any(section.groups.values())]
    template = template_of(Path(__file__).parent / "report.html.j2")
    return template.render(rows=summary(runs), sections=sections, runs=runs, files=files)


def _names(names: list[str] | None, paths: list[Path]) -> list[str]:
    """Return a unique name for each run."""
    names = list(map(str, paths)) if names is None else names
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


# Quality measures of a model: the key in the log, the name, and the function that selects the best.
PERPLEXITY: Any = ("ppl", "perplexity", min)
ACCURACY: Any = ("accuracy", "accuracy (%)", max)


def summary(runs: dict[str, Run]) -> list[dict[str, str]]:
    """Return the rows of the summary table, one dictionary from heading to cell for each run."""
    records = [r for run in runs.values() for of in (run.training, *run.subsets.values()) for r in of]
    logged = {key for record in records for key in record.values}
    qualities = [quality for quality in (PERPLEXITY, ACCURACY) if quality[0] in logged] or [PERPLEXITY]
    return [_summary_row(name, run, qualities) for name, run in runs.items()]


def _summary_row(name: str, run: Run, qualities: list[Any]) -> dict[str, str]:
    """Return one run's row of the summary table, with quality measures on one validation subset."""
    subset = "valid" if "valid" in run.subsets else next(iter(run.subsets), "valid")
    suffix = "" if subset == "valid" else f" ({subset})"
    speeds = [speed for _, speed in _finite(run.training, "wps")]
    speeds = speeds[1:] or speeds  # The first log record includes warm-up.
    row = {"Run": name, "Updates": f"{max(record.update for record in run.all):,}"}
    for key, quality, best_of in qualities:
        values = _finite(run.subsets.get(subset, []), key)
        best = best_of(values, key=lambda point: point[1], default=None)
        row |= {
            f"Training {quality}, last": _last(_finite(run.training, key)),
            f"Validation {quality}, last": _last(values) + suffix,
            f"Validation {quality}, best": f"{best[1]:.2f} at update {best[0]:,}" if best else NOTHING,
        }
    layers = Counter(run.experts.values())
    return row | {
        "Tokens or images per second, median": f"{median(speeds):,.0f}" if speeds else NOTHING,
        "Training time": duration(run.seconds),
        "MoE layers × experts": ", ".join(f"{n} × {experts}" for experts, n in layers.items()) or NOTHING,
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
    """Return pairs (update, number) from all records with a finite number under `key`."""
    points = [(record.update, record.values.get(key, math.nan)) for record in records]
    return [(update, value) for update, value in points if math.isfinite(value)]


def _last(points: list[tuple[int, float]]) -> str:
    return f"{points[-1][1]:.2f}" if points else NOTHING
