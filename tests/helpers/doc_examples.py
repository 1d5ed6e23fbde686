"""Runs the examples in the docstrings of the public names."""

import doctest
import io

import torch

import fairseq_tutel as ft


def run_example(name: str) -> None:
    """Run the example in the docstring of `ft.NAME`, and compare its output with the docstring."""
    examples = doctest.DocTestFinder(recurse=False).find(
        getattr(ft, name), name, globs={"ft": ft, "torch": torch}
    )
    assert examples and examples[0].examples, f"{name} has no example"
    printed, runner = io.StringIO(), doctest.DocTestRunner(verbose=False)
    runner.run(examples[0], out=printed.write)
    assert not runner.failures, printed.getvalue()
