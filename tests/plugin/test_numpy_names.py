"""After the plugin is imported, numpy has every name that fairseq's source files use."""

import ast
import functools
import re
from pathlib import Path

import fairseq
import fairseq_cli
import numpy

from fairseq_tutel.plugin import register


def used_names(path):
    """Yield the names of numpy that a source file uses, such as `zeros` and `compat.long`."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    aliases = {a.asname or a.name for node in imports for a in node.names if a.name == "numpy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, name = ast.unparse(node).partition(".")
            if root in aliases and re.fullmatch(r"[\w.]+", name):
                yield name


def exists(dotted):
    """Return whether numpy has a dotted name; only the first two parts of the name are checked."""
    try:
        functools.reduce(getattr, dotted.split(".")[:2], numpy)
    except AttributeError:
        return False
    return True


def test_numpy_has_every_name_that_fairseq_uses():
    register()
    files = [path for module in (fairseq, fairseq_cli) for path in Path(module.__path__[0]).rglob("*.py")]
    used = {name for path in files for name in used_names(path)}
    assert {"zeros", "random", "compat.long"} <= used
    assert sorted(name for name in used if not exists(name)) == []
