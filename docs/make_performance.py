"""Writes the tables of docs/performance.md from benchmarks/results.

`python docs/make_performance.py` rewrites them; with --check it only reports whether they are up to date.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import page

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "performance.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
BENCHMARKS = ("layer", "ops", "step", "generate", "generate_profile", "collectives")
COMPILED = "compiled.md"
STATIC = "static.json"
SHOWN_TARGETS = ("sm_90", "gfx942")

# See benchmarks/output.py.
Row = dict[str, Any]


class Result(NamedTuple):
    """One file that a benchmark wrote.

    Attributes:
        name: name of the file.
        content: see `benchmarks.output.Report`.
    """

    name: str
    content: dict[str, Any]

    @property
    def is_usual(self) -> bool:
        """Return whether the configurations and dtype are those of the main tables and plots."""
        return self.name.startswith(f"{self.content['benchmark']}_cpu")

    @property
    def command(self) -> str:
        """Return the command that wrote it."""
        words = [f"python -m benchmarks.{self.content['benchmark']}"]
        for key, value in self.content["options"].items():
            if value is True:
                words.append(f"--{key.replace('_', '-')}")
            elif value not in (None, False):
                values = value if isinstance(value, list) else [value]
                words.append(f"--{key.replace('_', '-')} {' '.join(map(str, values))}")
        return " ".join(words)


def filled_in(text: str, folder: Path = RESULTS) -> str:
    """Return the page's text with each table in its place.

    Args:
        text: of the page.
        folder: of the results; what is not there is said to be not measured yet.

    Raises:
        ValueError: a result is of --quick.
    """
    results = read(folder)

    def of(benchmark: str) -> list[Result]:
        return [r for r in results if r.content["benchmark"] == benchmark]

    cpu, special = ([r for r in of("layer") if r.is_usual is usual] for usual in (True, False))
    step, generate = of("step"), of("generate")
    by_hand = "python -m benchmarks.{} --json benchmarks/results/{}.json"
    by_static = f"python -m benchmarks.static --json benchmarks/results/{STATIC}"
    path = folder / STATIC
    static = json.loads(path.read_text()) if path.exists() else {"kernels": [], "peers": [], "layers": []}
    tables = {
        "runs": (runs_table(results), by_hand.format("layer", "layer_cpu")),
        "layer cpu": (layer_table(cpu), by_hand.format("layer", "layer_cpu")),
        "layer special": (layer_table(special), by_hand.format("layer --configs small", "layer_small")),
        "memory cpu": (memory_table(cpu), by_hand.format("layer", "layer_cpu")),
        "left out": (
            left_out_table(cpu + special + step + generate),
            by_hand.format("layer", "layer_cpu"),
        ),
        "ops cpu": (ops_table(of("ops")), by_hand.format("ops", "ops_cpu")),
        "step": (step_table(step), by_hand.format("step --top-k 1 2 --profile", "step_cpu")),
        "profile": (profile_table(step), by_hand.format("step --profile", "step_cpu")),
        "generate": (generate_table(generate), by_hand.format("generate", "generate_cpu")),
        "beam search": (
            beam_search_table(of("generate_profile")),
            by_hand.format("generate_profile", "generate_profile"),
        ),
        "collectives": (
            collectives_table(of("collectives")),
            by_hand.format("collectives", "collectives"),
        ),
        "compiled": (
            compiled_table(folder / COMPILED),
            f"python -m benchmarks.compile_table --markdown benchmarks/results/{COMPILED}",
        ),
        "static kernels": (static_kernels_table(static["kernels"]), by_static),
        "static peers": (static_kernels_table(static["peers"]), by_static),
        "static layers": (static_layers_table(static["layers"]), by_static),
    }
    shown = {
        name: table or f"Not measured yet: `{command}` does it."
        for name, (table, command) in tables.items()
    }
    return page.filled(text, PAGE.name, shown)


def read(folder: Path) -> list[Result]:
    """Return the results of BENCHMARKS in a folder, by file name.

    Raises:
        ValueError: a file is of --quick.
    """
    results = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if content.get("benchmark") not in BENCHMARKS:
            continue
        if content["options"]["quick"]:
            raise ValueError(
                f"{path.name} was measured with --quick, whose times mean nothing; measure it without."
            )
        results.append(Result(path.name, content))
    return results


def runs_table(results: Iterable[Result]) -> str:
    """Return the command, machine and versions of each file."""
    rows = []
    for result in results:
        content = result.content
        machine = content["machine"]
        rows.append(
            [
                _stem(result.name) + ("" if content["complete"] else ", cut short"),
                f"`{result.command}`",
                machine["device"],
                machine["cores"],
                machine["dtype"],
                machine["torch"],
                machine["triton"] or "-",
            ]
        )
    header = ["file", "command", "device", "cores", "numbers", "torch", "triton"]
    return _table(rows, header)


def layer_table(results: Iterable[Result]) -> str:
    """Return every variant's time over dense's, a line for each configuration and number of threads."""
    return _ratios(results, "dense", "ms", lambda row: _milliseconds(row["seconds"]))


def step_table(results: Iterable[Result]) -> str:
    """Return every variant's time over dense's, a line for each model."""
    return _ratios(results, "dense", "s", lambda row: f"{row['seconds']:.2f}")


def generate_table(results: Iterable[Result]) -> str:
    """Return the time over dense's, a line for each batch."""
    return _ratios(results, "dense", "tokens/s", lambda row: f"{row['rate']:.0f}")


def beam_search_table(results: Iterable[Result]) -> str:
    """Return the time over dense's and the share of each part, a line for each batch and beam size."""
    rows = []
    for result in results:
        found = {(row["configuration"], row["variant"]): row for row in result.content["rows"]}
        for configuration in result.content["configurations"]:
            dense, moe = found[configuration, "dense"], found[configuration, "moe"]
            shares = [f"{100 * share:.1f} %" for share in moe["shares"].values()]
            rows.append([configuration, f"{dense['rate']:.0f}", _ratio(moe), *shares])
    parts = ["products", "rest of MoE layers", "other modules", "search"]
    return _table(rows, ["configuration", "dense, tokens/s", "moe", *parts])


def collectives_table(results: Iterable[Result]) -> str:
    """Return gloo's microseconds, and every way's time over them, a column for each number of bytes."""
    lines: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for result in results:
        for row in result.content["rows"]:
            collective, ranks, size = result.content["configurations"][row["configuration"]].values()
            is_base = row["variant"] == "gloo"
            way = "gloo, µs" if is_base else row["variant"]
            cell = f"{1e6 * row['seconds']:.0f}" if is_base else _ratio(row).split()[0]
            lines[collective, str(ranks), way][_bytes(size)] = cell
    sizes = list(dict.fromkeys(size for line in lines.values() for size in line))
    rows = [[*key, *(line.get(size, "") for size in sizes)] for key, line in sorted(lines.items())]
    return _table(rows, ["collective", "ranks", "by", *sizes])


def _bytes(size: int) -> str:
    for unit, large in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= large:
            return f"{size / large:g} {unit}"
    return f"{size} B"


def ops_table(results: Iterable[Result]) -> str:
    """Return every backend's time over the reference's, a line for each op and size."""
    return _ratios(
        results,
        "reference",
        "rate",
        lambda row: f"{_milliseconds(row['seconds'])} ms, {_rate(row)}",
    )


def _ratios(results: Iterable[Result], base: str, what: str, of_base: Any) -> str:
    """Return a table of ratios: lines are configurations, columns the base itself and the others."""
    lines: dict[tuple[str, str, str], dict[str, Row]] = defaultdict(dict)
    for result in results:
        for row in result.content["rows"]:
            where = _where(result, row)
            lines[_stem(result.name), row["configuration"], where][row["variant"]] = row
    ran = [row["variant"] for line in lines.values() for row in line.values() if _has_times(row)]
    variants = [variant for variant in dict.fromkeys(ran) if variant != base]
    rows = []
    for key, line in lines.items():
        own = line[base]
        rows.append(
            [
                *key,
                of_base(own) if _has_times(own) else own["status"],
                *(_ratio(line.get(variant)) for variant in variants),
            ]
        )
    return _table(rows, ["file", "configuration", "on", f"{base}, {what}", *variants])


def _stem(name: str) -> str:
    return f"`{Path(name).stem}`"


def _where(result: Result, row: Row) -> str:
    threads = row.get("threads", result.content["options"]["threads"])
    return f"{threads} thread{'s' if threads > 1 else ''}"


def _has_times(row: Row) -> bool:
    return "ratio" in row


def _ratio(row: Row | None) -> str:
    if row is None or row["status"] == "skipped":
        return "-"
    if not _has_times(row):
        return row["status"]
    return f"{row['ratio']:.3f} ({row['ratio_p20']:.3f}..{row['ratio_p80']:.3f})"


def _rate(row: Row) -> str:
    return f"{row['rate'] / 1e9:,.1f} G{row['rate_unit']}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.4g}"


def memory_table(results: Iterable[Result]) -> str:
    """Return the saved activations of each variant in MiB, with the formula if there is one."""
    lines: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for name, content in results:
        for row in content["rows"]:
            if "kept_bytes" in row:
                lines[_stem(name), row["configuration"]][row["variant"]] = row
    variants = list(dict.fromkeys(variant for line in lines.values() for variant in line))
    rows = [[*key, *(_kept(line.get(variant)) for variant in variants)] for key, line in lines.items()]
    return _table(rows, ["file", "configuration", *variants])


def _kept(row: Row | None) -> str:
    if row is None:
        return "-"
    formula = f" of {_mebibytes(row['formula_bytes'])}" if "formula_bytes" in row else ""
    return f"{_mebibytes(row['kept_bytes'])}{formula}"


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.1f}"


def left_out_table(results: Iterable[Result]) -> str:
    """Return the variants that did not run, with the reason."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        for row in result.content["rows"]:
            if row["status"] != "ok":
                where = found[row["variant"], f"{row['status']}: {row['reason']}"]
                where.append(row["configuration"])
    rows = [
        [variant, reason.replace("|", "\\|"), ", ".join(dict.fromkeys(where))]
        for (variant, reason), where in found.items()
    ]
    return _table(rows, ["variant", "why it has no times", "where"])


def profile_table(results: Iterable[Result]) -> str:
    """Return the largest operations of a step, dense and with experts side by side."""
    rows = []
    for name, content in results:
        for configuration, about in content["configurations"].items():
            entries = about.get("profile", {})
            pairs = zip(entries.get("dense", ()), entries.get("moe", ()), strict=True)
            for number, (dense, moe) in enumerate(pairs, start=1):
                rows.append([_stem(name), configuration, number, *_entry(dense), *_entry(moe)])
    own = ["operation", "ms", "share"]
    models = [f"{model}: {each}" for model in ("dense", "moe") for each in own]
    return _table(rows, ["file", "configuration", "", *models])


def _entry(entry: dict[str, Any]) -> list[str]:
    return [f"`{entry['name']}`", f"{entry['self_ms']:.1f}", f"{entry['share']:.1%}"]


def compiled_table(path: Path) -> str:
    """Return the extremes of the table of benchmarks.compile_table, for each target."""
    if not path.exists():
        return ""
    lines = path.read_text().splitlines()
    header, *cells = ([cell.strip() for cell in line.strip(" |").split("|")] for line in lines)
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in cells[1:]:
        kernel = dict(zip(header, row, strict=True))
        found[kernel["target"]].append(kernel)

    def most(kernels: list[dict[str, str]], column: str) -> str:
        largest = max(kernels, key=lambda kernel: int(kernel[column]))
        return f"{largest[column]} (`{largest['kernel']}`)"

    rows = [
        [
            target,
            len(kernels),
            most(kernels, "registers"),
            most(kernels, "shared bytes"),
            ", ".join(f"`{k['kernel']}`" for k in kernels if int(k["spilled"])) or "none",
        ]
        for target, kernels in found.items()
    ]
    return _table(
        rows, ["target", "kernels", "most registers", "most shared bytes", "with spilled registers"]
    )


STATIC_COLUMNS = {
    "registers": "registers", "shared": "shared, B", "programs": "programs", "spilled": "spilled",
    "mma": "MMA", "other_per_mma": "others per MMA", "barriers": "barriers",
}  # fmt: skip


def static_kernels_table(rows: Sequence[Row]) -> str:
    """Return the figures of kernels on SHOWN_TARGETS, a line for each kernel and target."""
    found = [
        [row["target"], row["kernel"], *(row.get(name, "-") for name in STATIC_COLUMNS)]
        for row in rows
        if row["target"] in SHOWN_TARGETS
    ]
    return _table(found, ["target", "kernel", *STATIC_COLUMNS.values()])


def static_layers_table(rows: Sequence[Row]) -> str:
    """Return each layer's launches, host reads and bytes."""
    keys = ("layer", "tokens", "phase", "balance_loss", "launches", "reads")
    found = [
        [*(row[key] for key in keys), f"{row['bytes'] / 1e9:.2f}", f"{row['floor_bytes'] / 1e9:.2f}"]
        for row in rows
    ]
    return _table(
        found, ["layer", "tokens", "phase", "balance loss", "launches", "host reads", "GB", "floor, GB"]
    )


def _table(rows: list[list[Any]], header: list[str]) -> str:
    """Return a table, or "" without lines."""
    return page.table(rows, header) if rows else ""


def draw(folder: Path = RESULTS) -> None:
    """Draw the times of layers and steps on one thread, a panel for each configuration."""
    for benchmark in ("layer", "step"):
        rows = {}
        for result in read(folder):
            content = result.content
            if content["benchmark"] == benchmark and result.is_usual:
                for row in content["rows"]:
                    # Of several files the first, which of a step is not the one from before.
                    if row.get("threads", 1) == 1:
                        rows.setdefault((row["configuration"], row["variant"]), row)
        if rows:
            sys.path.insert(0, str(DOCS.parent))
            from benchmarks.output import plot

            report = SimpleNamespace(rows=list(rows.values()), base="dense")
            plot(report, DOCS / f"performance_{benchmark}.png")


if __name__ == "__main__":
    if page.run(PAGE, filled_in, __doc__):
        draw()
