"""Tests `Run`, the state of a command, and the list of attributes that the plugin sets on other objects."""

import ast
from pathlib import Path

import pytest

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.run_state import Run

register()
from fairseq_tutel.plugin.registration.wrapped import CHANGED  # noqa: E402

PACKAGE = Path(__file__).parents[2] / "fairseq_tutel"
INTEGRATION = [
    path for folder in ("plugin", "models", "tasks") for path in sorted((PACKAGE / folder).rglob("*.py"))
]


def test_run_state_fields_are_restored_after_an_error():
    run = Run(cfg=1)
    with pytest.raises(KeyError), run.having(cfg=2):
        assert run.cfg == 2
        raise KeyError
    assert run.cfg == 1


CONFIGURATIONS = {"cfg", "root", "distributed", "section", "node", "member"}


def set_from_outside(path):
    """Yield the names of attributes that a source file sets on objects other than `self`."""
    module = ast.parse(path.read_text())
    builders = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and "classmethod" in map(ast.unparse, node.decorator_list)
    ]
    built = {node for builder in builders for node in ast.walk(builder)}
    for node in set(ast.walk(module)) - built:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            is_configuration = owner.split(".")[0] in CONFIGURATIONS
            if owner not in ("self", "ctx") and not is_configuration and node.attr not in ("data", "grad"):
                yield node.attr


def test_every_attribute_that_the_plugin_sets_on_other_objects_is_listed():
    files = [*INTEGRATION, *(PACKAGE / "parallel").glob("*.py")]
    found = {(p.relative_to(PACKAGE).as_posix(), name) for p in files for name in set_from_outside(p)}
    assert found == {(file, name) for file, names in CHANGED.items() for name in names.split()}
