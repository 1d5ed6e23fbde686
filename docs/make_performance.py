"""Writes the tables of docs/performance.md from benchmarks/results.

`python docs/make_performance.py` rewrites them; with --check it only reports whether they are up to date.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import page

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "performance.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
BENCHMARKS = ("layer", "step", "generate", "collectives", "compiled")
SIZES = (64, 4096, 262144, 16777216)  # sizes of collectives in the table, in bytes

# The columns are described in benchmarks/output.py.
Row = dict[str, Any]


class Result(NamedTuple):
    """A file that a benchmark wrote; `content` has the form of `benchmarks.output.Report`."""

    name: str
    content: dict[str, Any]

    @property
    def command(self) -> str:
        """Return the command that wrote the file."""
        words = [f"python -m benchmarks.{self.content['benchmark']}"]
        for key, value in self.content["options"].items():
            if value is True:
                words.append(f"--{key.replace('_', '-')}")
            elif value not in (None, False, ""):
                values = value if isinstance(value, list) else [value]
                words.append(f"--{key.replace('_', '-')} {' '.join(map(str, values))}")
        return " ".join(words)


def filled_in(text: str) -> str:
    """Return the page's text with each table in its place."""
    results = read()

    def of(benchmark: str) -> list[Result]:
        return [r for r in results if r.content["benchmark"] == benchmark]

    (compiled,) = of("compiled")
    tables = {
        "runs": page.table([[f"`{r.name}`", f"`{r.command}`"] for r in results], ["file", "command"]),
        "layer": ratios(of("layer"), "ms", lambda row: f"{1000 * row['seconds']:.4g}"),
        "memory": memory_table(of("layer")),
        "step": ratios(of("step"), "s", lambda row: f"{row['seconds']:.2f}"),
        "generate": ratios(of("generate"), "tokens/s", lambda row: f"{row['rate']:.0f}"),
        "collectives": collectives_table(of("collectives")),
        "compiled": compiled_table(compiled),
        "launches": launches_table(compiled),
    }
    return page.filled(text, PAGE.name, tables)


def read() -> list[Result]:
    """Return the results of BENCHMARKS, by file name."""
    found = [(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return [Result(*each) for each in found if each[1].get("benchmark") in BENCHMARKS]


def ratios(results: Sequence[Result], unit: str, of_dense: Callable[[Row], str]) -> str:
    """Return the table of every variant's time divided by the dense time, one line per configuration."""
    lines: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for result in results:
        for row in result.content["rows"]:
            if "ratio" in row:
                lines[f"`{result.name}`", row["configuration"]][row["variant"]] = row
    variants = [
        name for name in dict.fromkeys(v for line in lines.values() for v in line) if name != "dense"
    ]
    rows = [
        [*key, of_dense(line["dense"]), *(_ratio(line.get(variant)) for variant in variants)]
        for key, line in lines.items()
    ]
    return page.table(rows, ["file", "configuration", f"dense, {unit}", *variants])


def _ratio(row: Row | None) -> str:
    return f"{row['ratio']:.2f} ({row['ratio_p20']:.2f}..{row['ratio_p80']:.2f})" if row else "-"


def memory_table(results: Sequence[Result]) -> str:
    """Return the table of saved activations in MiB, with one line per configuration in fp32."""
    lines: dict[str, dict[str, int]] = defaultdict(dict)
    for result in results:
        for row in result.content["rows"]:
            if "kept_bytes" in row and result.content["machine"]["dtype"] == "float32":
                lines[row["configuration"]].setdefault(row["variant"], row["kept_bytes"])
    variants = list(dict.fromkeys(variant for line in lines.values() for variant in line))
    rows = [
        [key, *(f"{line[variant] / 2**20:.1f}" if variant in line else "-" for variant in variants)]
        for key, line in lines.items()
    ]
    return page.table(rows, ["configuration", *variants])


def collectives_table(results: Sequence[Result]) -> str:
    """Return the table of gloo's microseconds and each plan's time divided by gloo's, for each of SIZES."""
    lines: dict[tuple[str, int, str], dict[int, str]] = defaultdict(dict)
    for result in results:
        for row in result.content["rows"]:
            collective, ranks, size = result.content["configurations"][row["configuration"]].values()
            is_base = row["variant"] == "gloo"
            cell = f"{1e6 * row['seconds']:.0f}" if is_base else f"{row['ratio']:.2f}"
            lines[collective, ranks, "gloo, µs" if is_base else row["variant"]][size] = cell
    rows = [[*key, *(line.get(size, "") for size in SIZES)] for key, line in sorted(lines.items())]
    sizes = ["64 B", "4 KiB", "256 KiB", "16 MiB"]
    return page.table(rows, ["collective", "ranks", "by", *sizes])


def compiled_table(result: Result) -> str:
    """Return the table of the compiled kernels' largest resources, with one line per target."""
    targets: dict[str, list[Row]] = defaultdict(list)
    for row in result.content["rows"]:
        if "registers" in row:
            targets[row["configuration"]].append(row)

    def most(kernels: list[Row], key: str) -> str:
        largest = max(kernels, key=lambda kernel: kernel[key])
        return f"{largest[key]} (`{largest['variant'].split(',')[0]}`)" if largest[key] else "0"

    rows = [
        [
            target,
            len(found),
            most(found, "registers"),
            most(found, "shared"),
            sum(k["spilled"] for k in found),
        ]
        for target, found in targets.items()
    ]
    return page.table(rows, ["target", "kernels", "most registers", "most shared bytes", "spilled"])


def launches_table(result: Result) -> str:
    """Return the table of a layer's launches, host reads and bytes."""
    rows = [
        [row["configuration"], row["variant"], row["launches"], row["reads"], f"{row['bytes'] / 1e9:.2f}"]
        for row in result.content["rows"]
        if "launches" in row
    ]
    return page.table(rows, ["layer", "phase", "launches", "host reads", "GB"])


if __name__ == "__main__":
    page.run(PAGE, filled_in, __doc__)
