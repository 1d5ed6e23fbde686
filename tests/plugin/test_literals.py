"""Options that fairseq evaluates: the list is complete, and a file has literals there."""

import argparse
import ast
import re
from pathlib import Path

import fairseq
import fairseq_cli
import pytest
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from fairseq_tutel.plugin.opening.literals import EVALUATED, is_literal, refuse_code

CODE = "[500+0*__import__('os').system('touch pwned'),1000]"


class _Sources:
    """Which options reach eval() in fairseq's sources, by following arguments to it.

    `evaluators` maps the name of a function or class to its parameters that reach eval(), by place.
    """

    def __init__(self) -> None:
        self.evaluators = {"eval": {("", 0)}}
        self.found: set[str] = set()
        self.unnamed: set[str] = set()
        packages = [Path(package.__file__).parent for package in (fairseq, fairseq_cli)]
        files = [f for package in packages for f in package.rglob("*.py") if "eval" in f.read_text()]
        trees = [(f.name, ast.parse(f.read_text())) for f in files]
        # Files that call an evaluator of another file, as a subclass of a data set does.
        before = None
        while before != (before := (len(self.found), len(self.evaluators))):
            for file, tree in trees:
                self._visit(tree, file, None, None)

    def _visit(self, node, file, function, cls):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                self._call(child, file, function, cls)
            inner = child if isinstance(child, ast.FunctionDef | ast.Lambda) else function
            self._visit(child, file, inner, child.name if isinstance(child, ast.ClassDef) else cls)

    def _call(self, call, file, function, cls):
        name = getattr(call.func, "id", getattr(call.func, "attr", None))
        is_method = isinstance(call.func, ast.Attribute)
        if name == "add_argument":
            type_of = next((k.value for k in call.keywords if k.arg == "type"), None)
            used = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(type_of or ast.Pass())}
            if used & self.evaluators.keys():
                flags = [a.value for a in call.args if a.value.startswith("--")]
                self.found.update(flag[2:].replace("-", "_") for flag in flags)
        if name not in self.evaluators or (name == "eval" and is_method):  # model.eval()
            return
        for parameter, place in sorted(self.evaluators[name]):
            named = [k.value for k in call.keywords if k.arg == parameter]
            for argument in named or call.args[place : place + 1]:
                self._follow(argument, file, function, cls)

    def _follow(self, argument, file, function, cls):
        if isinstance(argument, ast.Attribute):
            self.found.add(argument.attr)
        elif isinstance(argument, ast.Call) and getattr(argument.func, "id", "") == "getattr":
            self.found.add(argument.args[1].value)
        elif isinstance(argument, ast.Name) and function is not None:
            parameters = [a.arg for a in function.args.args]
            if argument.id in parameters and isinstance(function, ast.FunctionDef):
                owner = cls if function.name == "__init__" else function.name
                place = parameters.index(argument.id) - (parameters[0] in ("self", "cls"))
                self.evaluators.setdefault(owner, set()).add((argument.id, place))
                if function.name == "__init__":
                    self.found.add(argument.id)
            elif argument.id not in parameters:
                assigned = [
                    n.value
                    for n in ast.walk(function)
                    if isinstance(n, ast.Assign)
                    and any(getattr(t, "id", "") == argument.id for t in n.targets)
                ]
                for value in assigned:
                    if not isinstance(value, ast.Name):
                        self._follow(value, file, function, cls)
        elif not isinstance(argument, ast.Constant):
            self.unnamed.add(f"{file}: {ast.unparse(argument)}")


@pytest.fixture(scope="module")
def sources():
    return _Sources()


def test_every_option_that_fairseq_evaluates_is_on_the_list(sources):
    assert sources.found == EVALUATED


def test_what_fairseq_evaluates_beside_options_is_known(sources):
    """Lines of a speech corpus's manifests, which are data; docs/checkpoints.md names them."""
    lines = {"codedataset.py", "quantize_f0.py", "data_utils.py"}
    assert sources.unnamed == {f"{file}: line.strip()" for file in lines}


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "None", "True", "1000,2000", "[1, 2]", " (0.9, 0.98)", "{'a': [1, -2.5]}", "{1, 2}",
        "[(512, 10, 5)] + [(512, 3, 2)] * 4 + [(512,2,2)] + [(512,2,2)]", "[(256, 3)] * 15", "1 - 0.02",
    ],
)  # fmt: skip
def test_literals_are_accepted(text):
    assert is_literal(text)


@pytest.mark.parametrize(
    "text",
    [
        CODE, "print", "print()", "[x for x in (1,)]", "().__class__", "(lambda: 1)()", "f'{1}'",
        "1 if 1 else 2", "10 ** 10 ** 10", "'%9999999999d' % 1", "[" * 5000, "(" * 99999,
        "[*range(9)]", "x := 1", "1; 2", "\0", "\N{SNOWMAN}", "9**9**9*1", "(1<<99999999999)*1",
        "1 or print()", "await x", "[1][print()]",
    ],
)  # fmt: skip
def test_code_is_refused(text):
    assert not is_literal(text)


@pytest.mark.parametrize("key", sorted(EVALUATED))
def test_code_in_any_field_at_any_depth_is_refused(key):
    for state in (
        {"cfg": OmegaConf.create({"model": {key: CODE}})},
        {"cfg": OmegaConf.create({"model": {"w2v_args": {"task": [{key: CODE}]}}})},
        {"args": argparse.Namespace(**{key: CODE}), "cfg": None},
        {"args": argparse.Namespace(**{f"decoder_{key}": CODE})},
        {"args": argparse.Namespace(**{key: CODE.encode()})},
        {"args": argparse.Namespace(w2v_args=argparse.Namespace(**{key: CODE}))},
    ):
        with pytest.raises(ValueError, match=rf"^x\.pt has .* as the option (decoder_)?{key}, which"):
            refuse_code(state, "x.pt", {})


def test_an_interpolation_may_only_name_what_is_looked_at_itself():
    model = {"adam_betas": "${optimizer.adam_betas}", "feature_encoder_spec": "${a.feature_encoder_spec}"}
    refuse_code({"cfg": OmegaConf.create({"model": model})}, "x.pt", {})
    for text in ("${name}", "${env:HOME}", "${${adam_betas}}", "${adam_betas}${adam_betas}"):
        with pytest.raises(ValueError, match="adam_betas"):
            refuse_code({"cfg": OmegaConf.create({"model": {"adam_betas": text}})}, "x.pt", {})


def test_what_the_user_gives_is_free_and_values_of_a_file_are_not():
    state = {"cfg": OmegaConf.create({"model": {"adam_betas": CODE}})}
    refuse_code(state, "x.pt", {"adam_betas": CODE})
    with pytest.raises(ValueError, match="adam_betas"):
        refuse_code(state, "x.pt", {"adam_betas": "(0.9, 0.98)"})


@pytest.mark.parametrize(
    ("cfg", "sentence"),
    [
        ({"model": "${oc.create:{adam_betas: print()}}"}, "as the option model, which calls a function"),
        ({"x": ["${oc.create:{}}"], "model": "${x.0}"}, "which calls a function"),
        ({"model": {"a": "${${b}:c}"}}, "which calls a function"),
        ({"model": {"a": "\\${oc.env:HOME}"}}, "which calls a function"),
        ({"model": Dictionary()}, "an object of the class Dictionary as the option model"),
        ({"model": {1: {"a": Dictionary()}}}, "an object of the class Dictionary as the option a"),
    ],
)  # fmt: skip
def test_no_object_and_no_resolver_stands_among_options(cfg, sentence):
    """fairseq's Dictionary may be in a checkpoint; its attributes come from the file."""
    for state in ({"cfg": cfg}, {"args": argparse.Namespace(**cfg)}):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            refuse_code(state, "x.pt", {})
