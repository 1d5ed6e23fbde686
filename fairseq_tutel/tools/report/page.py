"""report: draw one HTML page of how one or several trainings went, from fairseq's logs.

A run is a log of --log-format json (a --log-file, a captured output or hydra_train.log), a folder with
TensorBoard files, or a --save-dir that holds one of these. Several runs are overlaid.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from fairseq_tutel import __version__
from fairseq_tutel.tools.report.summary import summary_row
from fairseq_tutel.tools.run_files import default_names, find_log
from fairseq_tutel.tools.training_log import Run, join


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "report", help="draw one HTML page of how trainings went", description=__doc__
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a log or a --save-dir")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page to write"
    )
    parser.add_argument(
        "--name",
        action="append",
        dest="names",
        metavar="NAME",
        help="of a run; give it once for each, in their order (default: what tells the paths apart)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the page that the command line asks for; end with one sentence if that cannot be done."""
    try:
        output = arguments.output
        refuse_output(output)
        names = chosen_names(arguments.names, arguments.runs)
        logs = [find_log(path) for path in arguments.runs]
        runs = {name: join(log) for name, (log, _) in zip(names, logs, strict=True)}
        files = {name: list(map(str, of)) for name, (_, of) in zip(names, logs, strict=True)}
        text = page(runs, files)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.exit(f"error: --output is {output}, which can not be written: {error.strerror}.")
    print(f"wrote {output}")


def refuse_output(output: Path) -> None:
    """Refuse to write where no page can or should be: a log or a checkpoint is easily named by mistake.

    Raises:
        ValueError: naming the output and the fix.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"--output is {output}; give the name of a file in an existing folder.")
    if output.exists() and output.suffix != ".html":
        raise ValueError(
            f"--output is {output}, which exists and is no .html file; give another name."
        )


def chosen_names(names: list[str] | None, paths: list[Path]) -> list[str]:
    """Return the runs' names.

    Raises:
        ValueError: there are not as many names as runs, or two are the same.
    """
    names = default_names(paths) if names is None else names
    if len(names) != len(paths):
        raise ValueError(
            f"--name is given {len(names)} time(s) for {len(paths)} run(s); give it once for each."
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two runs are named {name}; tell them apart with --name, or drop one that is given twice."
            )
    return names


def page(runs: dict[str, Run], files: dict[str, list[str]]) -> str:
    """Return the HTML page of the runs, which `files` of the same names were read for.

    Raises:
        ValueError: what draws or fills in the page is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        from fairseq_tutel.tools.report.curves import curve_sections
        from fairseq_tutel.tools.report.layers import layer_section
        from fairseq_tutel.tools.report.load import expert_sections
    except ModuleNotFoundError as error:
        raise ValueError(
            f"report needs {error.name}, which is not installed; pip install 'fairseq-tutel[report]'."
        ) from error
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loss, experts, *others = curve_sections(runs)
    sections = [loss, experts, layer_section(runs), *expert_sections(runs), *others]
    return templates.get_template("report.html.j2").render(
        rows=[summary_row(name, run) for name, run in runs.items()],
        sections=[section for section in sections if any(section.groups.values())],
        runs=runs,
        files=files,
        version=__version__,
    )
