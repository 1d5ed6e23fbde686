"""What loading the plugin does to a process: it looks at fairseq first, and at fairseq's words alone."""

import sys

import pytest

from fairseq_tutel import plugin

plugin.register()


@pytest.fixture
def again(monkeypatch):
    """Return a function that registers in a process which did not, started by these words."""

    def register(*words):
        plugin.register.cache_clear()
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *words])
        plugin.register()

    return register


def test_the_words_of_another_program_are_its_own(again):
    again("--arch", "transformer_lm", "--is-moe")
    assert sys.argv[-1] == "--is-moe"
    again("--user-dir=here", "--is-moe")
    assert sys.argv[-1] == "--user-dir=here"


def test_another_fairseq_version_is_refused_at_every_try(again, monkeypatch):
    import fairseq

    monkeypatch.setattr(fairseq, "__version__", "1.0.0a0")
    refusal = r"version 1\.0\.0a0, but fairseq_tutel needs 0\.12"
    with pytest.raises(ImportError, match=refusal):
        again()
    with pytest.raises(ImportError, match=refusal):
        plugin.register()
