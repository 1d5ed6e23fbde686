"""Tests that flags, links and files in the docs exist."""

import argparse
import importlib
import importlib.util
import re
import subprocess
import sys

import pytest
from fairseq import options
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq_cli import score
from pages import PAGES, ROOT

from fairseq_tutel.__main__ import TOOLS
from fairseq_tutel.tools.parser import ToolParser

# Known flags of CTranslate2, hydra, pip, sacrebleu, Slurm, torchrun and Meta's branch of fairseq.
OF_OTHER_PROGRAMS = """
    --add-data-source-prefix-tags --alternate-decoder-ffn-embed-dim --cmr-log-lang-gates --config-dir
    --config-name --dummy-a2a
    --kill-on-bad-exit --master_addr --master_port --max-restarts --model --nnodes --no-build-isolation
    --node_rank --nproc_per_node --ntasks-per-node --output_dir --pad-to-fixed-bsz --pad-to-fixed-length
    --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv_backend --rdzv_endpoint --sentence-level
    --use-moe-pad-mask --use-sharded-state --use-stable-embedding
    --nodes --open-mode --requeue --shutdown-timeout --signal --signals-to-handle
"""
# A regular expression that matches flags, but not prefixes of flags such as --moe-.
FLAG = re.compile(r"(?<![\w-])--[a-z0-9](?:[\w-]*\w)?(?![\w-])")
# Flags of other programs in docs/failures.md.
OF_OTHER_PROGRAMS += " --array --no-kill --nodes --open-mode --rdzv-id --requeue --wrap"
SCRIPTS = [
    ROOT / "examples" / "quickstart.sh",
    *(path for folder in ("benchmarks", "tests/faults") for path in (ROOT / folder).rglob("*.py")),
]


def _make_tables():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lists_of_flags_in_docs_are_up_to_date():
    text = (ROOT / "docs" / "flags.md").read_text()
    assert _make_tables().filled_in(text) == text


def flags_of_the_package() -> set[str]:
    """Return all flags of the plugin and of the tools of `fairseq-tutel`."""
    parsers: list[argparse.ArgumentParser] = [ToolParser()]
    tools = parsers[0].add_subparsers()
    for module in {module for module, _ in TOOLS.values()}:
        importlib.import_module(f"fairseq_tutel.{module}").add_to(tools)
    found = {option.flag for option in _make_tables().all_options()}
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


def flags_of_fairseq() -> set[str]:
    """Return all flags of fairseq's commands, models, tasks, criterions and optimizers."""
    parsers = [
        options.get_training_parser(), options.get_generation_parser(interactive=True),
        options.get_eval_lm_parser(), options.get_validation_parser(), score.get_parser(),
        options.get_preprocessing_parser(),
    ]  # fmt: skip
    parts = [*MODEL_REGISTRY.values(), *TASK_REGISTRY.values()]
    parts += [part for kind in REGISTRIES.values() for part in kind["registry"].values()]
    for part in parts:
        parser = argparse.ArgumentParser(conflict_handler="resolve")
        parsers.append(parser)
        if hasattr(part, "add_args"):
            part.add_args(parser)
        elif getattr(part, "__dataclass", None):
            gen_parser_from_dataclass(parser, part.__dataclass())
    return {flag for parser in parsers for action in parser._actions for flag in action.option_strings}


def test_every_flag_in_the_docs_exists():
    known = flags_of_the_package() | flags_of_fairseq() | {*OF_OTHER_PROGRAMS.split()}
    known |= {flag for path in SCRIPTS for flag in FLAG.findall(path.read_text())}
    unknown = {
        (page, flag)
        for page in PAGES
        for flag in FLAG.findall((ROOT / page).read_text())
        if flag not in known
    }
    assert not unknown


LINKING = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[bce]*/*.md")]


def _anchors(page):
    """Return the anchors that GitHub creates for the headings of a page."""
    found = []
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for title in re.findall(r"^#+ (.*)$", text, re.M):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_in_docs_to_a_file_or_heading_resolves(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"", text)
    for link in {a or b for a, b in links}:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {link}"


def test_every_supported_feature_in_the_routing_table_names_an_existing_test_file():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "routing.md").read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 14
    ]
    header, rows = rows[0], [row for row in rows[1:] if not set(row[0]) <= set("-")]
    assert header[-2:] == ["here", "shown by"] and len(rows) > 30
    for row in rows:
        shown = re.findall(r"`(\w+)/(\w+)`", row[-1])
        assert bool(shown) == (row[-2] == "Y"), row[0]
        for folder, name in shown:
            assert (ROOT / "tests" / folder / f"test_{name}.py").is_file(), row[0]


@pytest.mark.long
def test_the_documentation_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", ".", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "docs" / "site" / "api.html").read_text()
    assert "experts per token, from 1 to the number of experts" in page
