"""Tests the command lines of all tools: help texts, examples, names of flags, and errors."""

import argparse
import re
import shlex
import subprocess
import sys

import pytest

from fairseq_tutel.__main__ import TOOLS, parser_of

# A program that checks that every help text has an example and needs no slow import.
HELP = """
import contextlib, io, sys
from fairseq_tutel.__main__ import TOOLS, main
from fairseq_tutel.convert.command import KINDS
kinds = [kind.name for kind in KINDS]
for words in ([], *([tool] for tool in TOOLS), *(["convert", kind] for kind in kinds)):
    sys.argv = ["fairseq-tutel", *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    assert f"example: {' '.join(['fairseq-tutel', *words])}" in printed.getvalue(), words
    slow = {"torch", "fairseq", "numpy", "matplotlib", "jinja2", "omegaconf"} & sys.modules.keys()
    assert not slow, (words, slow)
print(len(kinds))
"""


def test_the_help_of_every_tool_and_subcommand_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12


def subcommands(parser):
    """Return a dictionary from the name of each subcommand to its argument parser."""
    found = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: each for action in found for name, each in action.choices.items()}


PARSERS = {"": parser_of("")} | {tool: subcommands(parser_of(tool))[tool] for tool in TOOLS}
PARSERS |= {f"convert {kind}": each for kind, each in subcommands(PARSERS["convert"]).items()}
# All arguments that the help of a tool shows, except -h and subcommands.
SHOWN = {
    name: [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]
    for name, parser in PARSERS.items()
}


def parsed(*words):
    values = dict(vars(parser_of(words[0]).parse_args(words)))
    values.pop("run")
    return values


@pytest.mark.parametrize("name", PARSERS)
def test_the_example_in_the_help_of_a_tool_is_a_correct_command(name):
    command, *words = shlex.split(PARSERS[name].epilog.removeprefix("example: "))
    assert command == "fairseq-tutel" and " ".join(words).startswith(name)
    parsed(*words)


@pytest.mark.parametrize("name", PARSERS)
def test_help_texts_show_defaults_in_square_brackets(name):
    for action in SHOWN[name]:
        if action.default not in (None, False, "", argparse.SUPPRESS):
            shown = re.search(r"\[(.*)\]$", action.help)[1]
            assert type(action.default)(shown) == action.default, action.dest
        assert "default" not in action.help or name == "convert upcycle", action.dest


@pytest.mark.parametrize("name", PARSERS)
def test_inputs_of_tools_are_positional_and_outputs_use_the_flag_output(name):
    flags = {flag: action for action in SHOWN[name] for flag in action.option_strings}
    assert not {"--input", "--inputs", "--input-prefix", "--model"} & flags.keys()
    assert "--data" not in flags or name == "convert vocabulary"  # optional in `convert vocabulary`
    assert ("--output" in flags) == ("--overwrite" in flags)
    for flag, action in flags.items():
        if "write" in action.help.split() and action.nargs != 0:
            assert flag in ("--output", "--output-network", "--output-statistics"), flag
    names = {action.metavar for action in SHOWN[name] if not action.option_strings}
    one_word_each = {"MODEL", "CHECKPOINT", "DATA", "FILE", "INPUT", "INPUTS", "PREFIX", "RUN", "WORD"}
    assert names <= one_word_each | {"PLAN", "NETWORK", "N"}


A, B = ("a.pt", "b.pt")
FORMER = {
    "convert --input": (
        ("convert", "sharded", "--input", A, "--output", B),
        ("convert", "sharded", A, "--output", B),
    ),
    "convert prune --input": (
        ("convert", "prune", "--drop", "0,3", "2", "--input", A, "--output", B),
        ("convert", "prune", A, "--drop", "0,3", "2", "--output", B),
    ),
    "convert tutel --input-prefix": (
        ("convert", "tutel", "--output", B, "--input-prefix=x-", "--input-size", "2"),
        ("convert", "tutel", "x-", "--input-size", "2", "--output", B),
    ),
    "average --inputs": (
        ("average", "--inputs", A, B, "--output", "c.pt"),
        ("average", A, B, "--output", "c.pt"),
    ),
}


@pytest.mark.parametrize("name", FORMER)
def test_former_flags_for_inputs_of_tools_still_work(name):
    former, now = FORMER[name]
    assert parsed(*former) == parsed(*now)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("convert", "full", "--output", B), "the following arguments are required: INPUT"),
        (("convert", "full", A, "--input", B, "--output", "c"), "unrecognized arguments: a.pt"),
        (("average", A, "--outptu", B), "the following arguments are required: --output"),
        (("average", "--output", B), "the following arguments are required: INPUTS"),
        (("average", A, "--output", "x/"), "argument --output: x/ ends with /; give the name of a file."),
        (("reprot",), "reprot is no tool; give one of report, tokens, "),
        (("plan", "--nodes", "0"), "--nodes: 0 is out of range; give at least 1"),
        (("plan", "--inter-gb-s", "nan"), "--inter-gb-s: nan is not above 0"),
        (("plan", "--gpu", "v100"), "--gpu: invalid choice: 'v100'"),
        (("schedule", "torus:1x4", "--slices", "9999"), "give at least 1 and at most 1024"),
    ],
)
def test_a_wrong_command_line_of_a_tool_ends_with_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(*words)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
