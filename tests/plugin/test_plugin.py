"""What loading the plugin does to a process: it looks at fairseq first, and at fairseq's words alone."""

import sys

import pytest
from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_tutel import plugin

plugin.register()
from fairseq_tutel.plugin.registration.flags import drop_suggestions  # noqa: E402


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
    assert end.value.code == (
        "error: --moe-top-k=2 was given with --arch transformer_lm, which is dense; give --arch "
        "moe_transformer_lm, or remove the flag."
    )


@pytest.mark.parametrize("registered", [False, True])
def test_a_user_s_own_architecture_takes_them(again, registered, monkeypatch):
    if registered:  # else it will be, after this
        moe = ARCH_MODEL_REGISTRY["moe_transformer_lm"]
        monkeypatch.setitem(ARCH_MODEL_REGISTRY, "my_lm_8x", moe)
    again("--user-dir", "mine", "--arch", "my_lm_8x", "--moe-freq", "1")


def test_a_misspelt_flag_is_told_after_argparse_did_not_know_it(again, monkeypatch, capsys):
    hints = []
    monkeypatch.setattr("atexit.register", lambda *hint: hints.append(hint))
    flags = ("--moe-topk=1", "--moe-gate-loss-weight", "1", "--moe-top-k", "2", "--max-tokens", "5")
    again("--user-dir", "user_dir", "--help", *flags)
    pairs = {"moe-topk": "moe-top-k", "moe-gate-loss-weight": "moe-gate-loss-wt"}
    for tell, *words in hints:
        tell(*words)
    said = capsys.readouterr()
    assert said.out.endswith("moe_ architectures: fairseq-tutel flags [WORD]\n")
    expected = [f"error: --{a} is not a known flag; did you mean --{b}?" for a, b in pairs.items()]
    assert said.err.splitlines() == expected
    taken_back = []
    monkeypatch.setattr("atexit.unregister", taken_back.append)
    drop_suggestions()
    assert {tell for tell, *_ in hints} == set(taken_back)


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
