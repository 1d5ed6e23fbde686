"""The tool `flags` prints flags with their help, including flags that `fairseq-train --help` omits."""

import argparse
import textwrap
from typing import Any

from fairseq_tutel.option import Option, options_in
from fairseq_tutel.plugin.distillation_options import DistillationConfig
from fairseq_tutel.plugin.ensemble_options import CMCLConfig, EnsembleConfig
from fairseq_tutel.plugin.options import BY_OWNER, options_of
from fairseq_tutel.vision.options import ImageConfig, SwinConfig, SwinExpertsConfig

# Tables of options that are not in BY_OWNER.
OTHER_TABLES = (ImageConfig, SwinConfig, SwinExpertsConfig, EnsembleConfig, CMCLConfig, DistillationConfig)
THEMES = (
    "Routing", "Capacity", "Balance", "Experts", "Training", "Parallelism", "Communication", "Memory",
    "Checkpoints", "Kernels", "Logging", "Images", "Vision", "Ensembles", "Distillation", "Older names",
)  # fmt: skip


def all_options() -> list[Option]:
    """Return the options of model, criterion and task, and after these the options in `OTHER_TABLES`."""
    return [
        *(option for owner in BY_OWNER for option in options_of(owner)),
        *(option for table in OTHER_TABLES for option in options_in(table)),
    ]


def add_to(tools: Any) -> None:
    """Add the tool `flags` as a subcommand of `python -m fairseq_tutel`."""
    parser = tools.add_parser("flags", description=__doc__, example="capacity")
    text = "print only flags with these words in their name or help [all flags]"
    parser.add_argument("word", nargs="*", metavar="WORD", help=text)
    for option in all_options():  # WORD may be a flag.
        constant = {"action": "append_const", "const": option.flag, "help": argparse.SUPPRESS}
        parser.add_argument(option.flag, dest="flag", default=[], **constant)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the flags that match a word; raise ValueError if no flag matches."""
    every = all_options()
    pattern = " ".join([*arguments.word, *arguments.flag]).lower()
    if not any(_matches(option, pattern) for option in every):
        raise ValueError(f"no flag has {pattern!r} in its name or help; give another word.")
    for theme in THEMES:
        options = [option for option in every if option.theme == theme and _matches(option, pattern)]
        if options:
            print(f"{theme}:")
        for option in options:
            text = f"{option.text} [{option.shown_default}]"
            print(f"  {option.flag} ({option.of})")
            print(textwrap.fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _matches(option: Option, pattern: str) -> bool:
    # All spellings of a word match, such as topk, top_k and "top k".
    names = " ".join([option.flag, option.key, option.key.replace("_", ""), option.key.replace("_", " ")])
    return pattern in f"{names} {option.text}".lower()
