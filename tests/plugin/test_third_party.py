"""Harmless warnings of others are hidden, all others appear; fairseq's parameter counts are corrected."""

import functools
import logging
import re
import warnings

import pytest
from torch import nn

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.plugin.registration.third_party import HIDDEN, WholeCounts, hide_warnings


@pytest.fixture
def shown():
    """Return a function that warns, and returns whether the warning appears."""

    def warn(text, category, module, prepare=warnings.resetwarnings):
        with warnings.catch_warnings(record=True) as found:
            prepare()
            hide_warnings()
            warnings.warn_explicit(text, category, "file.py", 1, module=module, registry={})
        return bool(found)

    return warn


@pytest.mark.parametrize("row", HIDDEN, ids=lambda row: row.text[:30])
def test_only_the_warning_of_the_table_is_hidden(row, shown):
    module, text = row.module or "any.caller", row.text.replace("[^']*", "tiny_lm").replace(r"\n", "\n")
    text = re.sub(r"\\(.)", r"\1", text)
    assert not shown(f"{text} …", row.category, module)
    assert shown(f"{text[:-2]} …", row.category, module)
    assert shown(f"{text} …", RuntimeWarning, module)
    if row.module:
        assert shown(f"{text} …", row.category, f"{row.module}.more")
    assert len(row.reason) > 20


def test_a_user_s_own_filter_shows_them(shown):
    text, module, category, _ = HIDDEN[0]
    as_python_does = functools.partial(warnings._setoption, "default")
    assert shown(text, category, module, as_python_does)


def records(*messages):
    """Return what fairseq-train's log lines become."""
    counts, found = WholeCounts(), []
    for message in messages:
        record = logging.LogRecord("fairseq_cli.train", logging.INFO, "train.py", 1, message, (), None)
        assert counts.filter(record)
        found.append(record.getMessage())
    return found


SHARED = "num. shared model params: 64,404 (num. trained: 64,404)"
EXPERT = "num. expert model params: 0 (num. trained: 0)"


def test_the_counts_of_a_model_with_experts_are_corrected():
    layer = MoELayer(MoEConfig(4, 6, 8))
    experts = sum(parameter.numel() for parameter in layer.experts.parameters())
    assert records(layer, "task: x", SHARED, EXPERT)[1:] == [
        "task: x",
        "num. shared model params: 32 (num. trained: 32)",
        f"num. expert model params: {experts:,} (num. trained: {experts:,})",
    ]
    assert records(layer, nn.Linear(2, 2), SHARED, EXPERT)[2:] == [SHARED, EXPERT]
    assert records(SHARED, EXPERT) == [SHARED, EXPERT]
