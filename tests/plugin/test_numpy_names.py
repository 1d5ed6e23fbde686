"""Every name of numpy that fairseq's sources use exists once the plugin is imported."""

import ast
import functools
import re
from pathlib import Path

import fairseq
import fairseq_cli
import numpy

from fairseq_tutel.plugin import register


def used_names(path):
    """Yield the dotted names after `np.` or `numpy.`, such as compat.long, of a source file."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    aliases = {a.asname or a.name for node in imports for a in node.names if a.name == "numpy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, name = ast.unparse(node).partition(".")
            if root in aliases and re.fullmatch(r"[\w.]+", name):
                yield name


def exists(dotted):
    """Return whether numpy has a name; attributes of its values, such as those of a class, do not count."""
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
