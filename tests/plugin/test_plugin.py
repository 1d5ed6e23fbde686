"""`register` refuses an unsupported version of fairseq, and changes no other program's command line."""

import sys

import pytest

from fairseq_tutel import plugin

plugin.register()


@pytest.fixture
def again(monkeypatch):
    """Return a function that registers the plugin again with the given command-line arguments."""

    def register(*words):
        plugin.register.cache_clear()
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *words])
        plugin.register()

    return register


def test_the_command_line_of_another_program_is_not_changed(again):
    again("--arch", "transformer_lm", "--is-moe")
    assert sys.argv[-1] == "--is-moe"
    again("--user-dir=here", "--is-moe")
    assert sys.argv[-1] == "--user-dir=here"


def test_every_call_of_register_refuses_an_unsupported_fairseq_version(again, monkeypatch):
    import fairseq

    monkeypatch.setattr(fairseq, "__version__", "1.0.0a0")
    refusal = r"version 1\.0\.0a0, but fairseq_tutel needs 0\.12"
    with pytest.raises(ImportError, match=refusal):
        again()
    with pytest.raises(ImportError, match=refusal):
        plugin.register()
