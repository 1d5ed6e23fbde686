"""fairseq passes some options to eval(), so the plugin refuses checkpoints with code in these options."""

import argparse
import re

import pytest
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from fairseq_tutel.plugin.opening.literals import EVALUATED, is_literal, refuse_code

CODE = "[500+0*__import__('os').system('touch pwned'),1000]"


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "None", "True", "1000,2000", "[1, 2]", " (0.9, 0.98)", "{'a': [1, -2.5]}", "{1, 2}",
        "[(512, 10, 5)] + [(512, 3, 2)] * 4 + [(512,2,2)] + [(512,2,2)]", "[(256, 3)] * 15", "1 - 0.02",
    ],
)  # fmt: skip
def test_python_literals_in_options_are_accepted(text):
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
def test_python_code_in_options_is_refused(text):
    assert not is_literal(text)


@pytest.mark.parametrize("key", sorted(EVALUATED))
def test_code_in_an_option_that_fairseq_evaluates_is_refused_at_any_depth(key):
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


def test_an_omegaconf_interpolation_may_only_name_an_option_that_is_checked_for_code():
    model = {"adam_betas": "${optimizer.adam_betas}", "feature_encoder_spec": "${a.feature_encoder_spec}"}
    refuse_code({"cfg": OmegaConf.create({"model": model})}, "x.pt", {})
    for text in ("${name}", "${env:HOME}", "${${adam_betas}}", "${adam_betas}${adam_betas}"):
        with pytest.raises(ValueError, match="adam_betas"):
            refuse_code({"cfg": OmegaConf.create({"model": {"adam_betas": text}})}, "x.pt", {})


def test_code_in_an_option_is_accepted_from_the_user_but_not_from_a_checkpoint():
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
def test_objects_and_omegaconf_resolvers_in_options_are_refused(cfg, sentence):
    """A Dictionary as an option is refused, because the checkpoint could set attributes of the object."""
    for state in ({"cfg": cfg}, {"args": argparse.Namespace(**cfg)}):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            refuse_code(state, "x.pt", {})
