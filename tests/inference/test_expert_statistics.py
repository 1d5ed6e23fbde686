"""Expert statistics: their file, means over language pairs, importance, and invalid files."""

import json
import math

import pytest

from fairseq_tutel.inference.expert_statistics import (
    LayerStatistics,
    of_layer,
    pooled,
    read_statistics,
    text_of,
)

# Expert 0 is the first choice of 3 of 4 tokens, and of 3 of 12 tokens.
GERMAN = LayerStatistics(4, [0.75, 0.25, 0.0], [0.5, 0.9, 0.0], [1.5, 1.2, 0.3])
FRENCH = LayerStatistics(12, [0.25, 0.25, 0.5], [0.7, 0.4, 0.6], [0.75, 0.75, 1.5])
BOTH = {"de-en": {"encoder_0": GERMAN, "decoder_1": GERMAN}, "fr-en": {"encoder_0": FRENCH}}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "use.json"
    path.write_text(text_of(BOTH))
    return path


def test_a_file_is_read_as_it_was_written(path):
    assert read_statistics(path, "--statistics") == BOTH


def test_importance_is_activity_times_the_exponential_of_confidence():
    expected = [0.75 * math.exp(0.5), 0.25 * math.exp(0.9), 0]
    mean = sum(expected) / 3
    assert GERMAN.importance == pytest.approx([each / mean for each in expected])


def test_pairs_are_pooled_as_if_their_tokens_were_counted_together(path):
    found = pooled(BOTH, (), path, "--keep-for")
    both = found["encoder_0"]
    assert both.tokens == 16
    assert both.activity == pytest.approx([6 / 16, 4 / 16, 6 / 16])
    assert both.confidence == pytest.approx([(3 * 0.5 + 3 * 0.7) / 6, (0.9 + 3 * 0.4) / 4, 0.6])
    assert both.load == pytest.approx([(4 * 1.5 + 12 * 0.75) / 16, (4 * 1.2 + 12 * 0.75) / 16, 1.2])
    assert found["decoder_1"] == GERMAN
    (one,) = pooled(BOTH, ["fr-en", "fr-en"], path, "--keep-for").values()
    assert one.tokens == 12 and one.importance == pytest.approx(FRENCH.importance)


LAYER = {"tokens": 4, "activity": [1, 0], "confidence": [0.5, 0], "load": [2, 0]}
REFUSED = {
    "no JSON": "{",
    "a list": [],
    "another version": {"expert_statistics": 2, "pairs": {}},
    "empty": {"expert_statistics": 1, "pairs": {}},
    "lengths": LAYER | {"load": [2]},
    "a word": LAYER | {"load": ["2", 0]},
    "not finite": LAYER | {"activity": [math.nan, 1]},
    "tokens": LAYER | {"tokens": 0},
    "no choices": LAYER | {"activity": [0, 0]},
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_file_raises_a_one_sentence_error(case, tmp_path):
    content = REFUSED[case]
    if isinstance(content, dict) and "tokens" in content:
        content = {"expert_statistics": 1, "pairs": {"all": {"decoder_0": content}}}
    path = tmp_path / "use.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"^--statistics names {path}, which has no statistics"):
        read_statistics(path, "--statistics")


def test_errors_name_a_missing_file_pair_or_layer(path, tmp_path):
    with pytest.raises(ValueError, match=r"No such file or directory"):
        read_statistics(tmp_path / "none.json", "--statistics")
    with pytest.raises(ValueError, match=r"^--keep-for has 'en-fr', .* choose from 'de-en', 'fr-en'\.$"):
        pooled(BOTH, ["en-fr"], path, "--keep-for")
    with pytest.raises(ValueError, match="has statistics of 3 experts for encoder_0, but the layer has 8"):
        of_layer(BOTH["de-en"], "encoder_0", 8, path, "--statistics")
    with pytest.raises(ValueError, match="has no statistics for decoder_1, but the layer has 3"):
        of_layer(BOTH["fr-en"], "decoder_1", 3, path, "--statistics")
