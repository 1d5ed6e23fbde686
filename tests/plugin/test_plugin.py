"""What loading the plugin does to a process: it looks at fairseq first, and at fairseq's words alone."""

import re
import sys

import pytest
from fairseq.models import ARCH_MODEL_REGISTRY

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


def test_flags_of_experts_with_a_dense_architecture_are_refused(again):
    with pytest.raises(SystemExit) as end:
        again("--user-dir", "user_dir", "--arch", "transformer_lm", "--moe-top-k=2")
    assert re.match("error: --moe-top-k=2 .* --arch moe_transformer_lm", end.value.code)


@pytest.mark.parametrize("registered", [False, True])
def test_a_user_s_own_architecture_takes_them(again, registered, monkeypatch):
    if registered:  # else it will be, after this
        moe = ARCH_MODEL_REGISTRY["moe_transformer_lm"]
        monkeypatch.setitem(ARCH_MODEL_REGISTRY, "my_lm_8x", moe)
    again("--user-dir", "mine", "--arch", "my_lm_8x", "--moe-freq", "1")


def test_the_words_of_another_program_are_its_own(again):
    again("--arch", "transformer_lm", "--moe-freq", "1", "--is-moe")
    assert sys.argv[-1] == "--is-moe"


def test_another_fairseq_version_is_refused_at_every_try(again, monkeypatch):
    import fairseq

    monkeypatch.setattr(fairseq, "__version__", "1.0.0a0")
    refusal = r"version 1\.0\.0a0, but fairseq_tutel needs 0\.12"
    with pytest.raises(ImportError, match=refusal):
        again()
    with pytest.raises(ImportError, match=refusal):
        plugin.register()
