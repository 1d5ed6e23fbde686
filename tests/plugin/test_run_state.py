"""State of the integration: one object holds it, and one table has the changes of other objects."""

import ast
from pathlib import Path

import pytest

from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.run_state import RunState

register()
from fairseq_tutel.plugin.registration.wrapped import CHANGED  # noqa: E402

PACKAGE = Path(__file__).parents[2] / "fairseq_tutel"
INTEGRATION = [
    path for folder in ("plugin", "models", "tasks") for path in sorted((PACKAGE / folder).rglob("*.py"))
]
CHANGING = {"append", "add", "clear", "pop", "update", "setdefault", "extend", "remove", "insert"}


def test_fields_are_restored_after_an_error():
    run = RunState(checkpoint="a.pt")
    with pytest.raises(KeyError), run.having(checkpoint="b.pt", is_saving=True):
        assert (run.checkpoint, run.is_saving) == ("b.pt", True)
        raise KeyError
    assert (run.checkpoint, run.is_saving) == ("a.pt", False)


CONFIGURATIONS = {"cfg", "root", "distributed", "section", "node", "member"}


def set_from_outside(path):
    """Yield attributes that a file sets on other objects; a classmethod may set those of what it builds."""
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


def test_attributes_of_other_objects_are_in_one_table():
    files = [*INTEGRATION, *(PACKAGE / "parallel").glob("*.py")]
    found = {(p.relative_to(PACKAGE).as_posix(), name) for p in files for name in set_from_outside(p)}
    assert found == {(file, name) for file, names in CHANGED.items() for name in names.split()}


def changed_in_functions(path):
    """Return names of a module's lists, sets and dictionaries that its functions change."""
    module = ast.parse(path.read_text())
    names = set()
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for function in (n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if node.func.attr in CHANGING and getattr(owner, "id", None) in names - {"RUN"}:
                    yield owner.id
            is_stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            if is_stored and getattr(node.value, "id", None) in names:
                yield node.value.id


def test_no_module_has_state_of_its_own():
    found = {path.name: set(changed_in_functions(path)) for path in INTEGRATION}
    assert {name: changed for name, changed in found.items() if changed} == {}
