"""flags: print the plugin's flags with their help; `fairseq-train --help` omits flags of architectures."""

import argparse
import re
import textwrap
from difflib import get_close_matches
from typing import Any

from fairseq_tutel.distillation.options import DistillationConfig
from fairseq_tutel.ensemble.options import CMCLConfig, EnsembleConfig
from fairseq_tutel.moe.option_table import options_of
from fairseq_tutel.options.option import Option, options_in
from fairseq_tutel.vision.options import ImageConfig, SwinConfig, SwinExpertsConfig

# Options that are defined outside of moe/: (title, dataclasses).
OTHER_TABLES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("of the task image_classification", (ImageConfig,)),
    ("of swin_v2 and swin_v2_moe", (SwinConfig, SwinExpertsConfig)),
    ("of the architecture ensemble_of", (EnsembleConfig,)),
    ("of the criterion cmcl", (CMCLConfig,)),
    ("of the criterion moe_distillation", (DistillationConfig,)),
)


def add_to(tools: Any) -> None:
    """Add this tool as a subcommand of `python -m fairseq_tutel`."""
    parser = tools.add_parser("flags", description=__doc__, example="capacity")
    text = "print only flags with these words in their name or help [all flags]"
    parser.add_argument("word", nargs="*", metavar="WORD", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the flags that match the word. If none match, print those of the most similar word."""
    tables = {
        "of the moe_ architectures": options_of("model"),
        "of every task": options_of("task"),
        "of the moe_ criterions": options_of("criterion"),
        **{title: [o for table in those for o in options_in(table)] for title, those in OTHER_TABLES},
    }
    every = [option for known in tables.values() for option in known]
    pattern = " ".join(arguments.word).lower()
    if not any(_matches(option, pattern) for option in every):
        words = {
            word for o in every for word in re.findall(r"[a-z]{3,}", f"{o.key.replace('_', ' ')} {o.text}")
        }
        similar = get_close_matches(pattern, words, 1, cutoff=0.75)
        if not similar:
            raise ValueError(f"no flag has {pattern!r} in its name or help; give another word.")
        print(f"no flag has {pattern!r}; flags with {similar[0]!r}:")
        pattern = similar[0]
    for title, known in tables.items():
        options = [option for option in known if _matches(option, pattern)]
        if options:
            print(f"{title}:")
        for option in options:
            text = f"{option.text} [{option.shown_default}]"
            print(f"  {option.flag}")
            print(textwrap.fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _matches(option: Option, pattern: str) -> bool:
    # Other spellings also match, such as topk, top_k and "top k".
    names = " ".join([option.flag, option.key, option.key.replace("_", ""), option.key.replace("_", " ")])
    return pattern in f"{names} {option.text}".lower()
