"""The command line, checked while the plugin is imported: misspelled and inapplicable --moe- flags."""

import argparse
import atexit
import logging
import sys

logger = logging.getLogger(__name__)


def has_user_dir(argv: list[str]) -> bool:
    """Whether this is the command line of a fairseq command that loads the plugin."""
    return any(word.split("=")[0] == "--user-dir" for word in argv)


def check(argv: list[str]) -> None:
    """Check a fairseq command's sys.argv; the first word is the program."""
    _refuse_flags_of_moe_variant(argv[1:])
    _suggest_flags_at_exit(argv[1:])
    # Meta's evaluation commands need --is-moe; here the checkpoint decides. No registry reaches the parser
    # of fairseq-eval-lm, which reads sys.argv after this import.
    if "--is-moe" in argv:
        argv.remove("--is-moe")
        logger.info("--is-moe is not needed: checkpoints of MoE models are recognized")


def _suggest_flags_at_exit(argv: list[str]) -> None:
    """Suggest a flag for each misspelled one, at exit: argparse prints its long usage before that."""
    from fairseq_tutel.options.option import flag_of, key_of
    from fairseq_tutel.plugin.registration.flags import meant

    for word in argv:
        flag = word.split("=")[0]
        close = meant(key_of(flag)) if flag.startswith("--") else None
        if close:
            atexit.register(_suggest_flag, flag, flag_of(close))


def _suggest_flag(flag: str, close: str) -> None:
    logger.warning("%s is none of the flags here; %s is", flag, close)


def drop_suggestions() -> None:
    """Drop the suggestions: argparse accepted the flags, as those of another model."""
    atexit.unregister(_suggest_flag)


def _refuse_flags_of_moe_variant(argv: list[str]) -> None:
    """Exit with one sentence if MoE flags are given to a dense architecture that has an MoE variant.

    argparse would only report unrecognized arguments. An architecture that is not registered yet may be a
    user's own.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_tutel.moe.option_table import options_of

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--arch", "-a")
    arch = parser.parse_known_args(argv)[0].arch
    if arch not in ARCH_MODEL_REGISTRY or f"moe_{arch}" not in ARCH_MODEL_REGISTRY:
        return
    known = {option.flag for option in options_of("model")}
    given = [a for a in argv if a.split("=")[0] in known]
    if given:
        sys.exit(
            f"error: {given[0]} was given with --arch {arch}, which is dense; choose --arch "
            f"moe_{arch} or drop the flag."
        )
