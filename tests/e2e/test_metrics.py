"""Checks the metrics of every layer and expert that fairseq-train logs."""

import re
from statistics import mean

import pytest
from cli import fairseq
from models import lm_args, mt_args

LAYERS = {"decoder_0": 4, "decoder_1": 6}
QUANTITIES = ("entropy", "max_violation", "dropped", "dead_experts", "weight1", "weight2")
AVERAGES = {"entropy": "entropy_gating", "weight1": "expert1_weight", "weight2": "expert2_weight"}


@pytest.fixture(scope="module")
def logged(lm_data, tmp_path_factory):
    """Two finished runs with learning rate 0, in a dictionary with keys (ranks, --update-freq)."""
    made = {}
    for ranks, freq in ((1, 2), (2, 1)):
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}-freq-{freq}")
        run = fairseq(
            "train", *lm_args(lm_data, folder, updates=5), "--lr", 0,
            "--update-freq", freq, "--sample-break-mode", "eos", "--tokens-per-sample", 32,
            "--moe-expert-count", "4,6", "--moe-capacity-factor", 1, "--no-save",
            ranks=ranks,
        )  # fmt: skip
        made[ranks, freq] = run
    return made


def numbers_of(record):
    """Return the expert metrics of a log record as floats, in a dictionary with keys (metric, index)."""
    numbers = {}
    for key, value in record.items():
        if re.search("moe_|expert|entropy", key):
            values = value if isinstance(value, list) else [value]
            numbers |= {(key, i): float(x) for i, x in enumerate(values)}
    return numbers


def test_two_ranks_log_the_expert_metrics_of_one_rank_with_two_micro_batches(logged):
    one, two = (logged[key].stats("train_inner") for key in ((1, 2), (2, 1)))
    assert len(one) == len(two) == 5
    for first, second in zip(one, two, strict=True):
        assert numbers_of(first) == pytest.approx(numbers_of(second), abs=2e-4)


@pytest.mark.parametrize("tag, prefix", [("train_inner", ""), ("valid", "valid_")])
def test_metrics_per_layer_agree_with_averages_over_layers(logged, tag, prefix):
    for record in logged[1, 2].stats(tag):
        record = {key.removeprefix(prefix): value for key, value in record.items()}
        for quantity in QUANTITIES:
            listed = record[f"moe_layers_{quantity}"]
            average = record[AVERAGES.get(quantity, f"moe_{quantity}")]
            assert mean(listed) == pytest.approx(float(average), abs=2e-4), quantity
        for i, (label, num_experts) in enumerate(LAYERS.items()):
            load = record[f"moe_load_{label}"]
            assert len(load) == num_experts
            assert mean(load) == pytest.approx(1, abs=1e-3)
            assert record["moe_layers_max_violation"][i] >= max(load) - 1e-3
            if tag == "valid":  # dropless
                assert not [key for key in record if key.startswith(f"moe_dropped_{label}")]
                assert record["moe_layers_dropped"][i] == 0
                continue
            dropped = record[f"moe_dropped_{label}"]
            overall = mean(share * part for share, part in zip(load, dropped, strict=True))
            assert 100 * overall == pytest.approx(record["moe_layers_dropped"][i], abs=0.1)
            assert overall > 0


def test_averages_ignore_a_layer_that_layerdrop_skips(mt_data, tmp_path):
    run = fairseq(
        "train", *mt_args(mt_data, tmp_path, updates=4), "--encoder-layerdrop", 0.6,
        "--disable-validation", "--no-save",
    )  # fmt: skip
    labels = ["encoder_0", "encoder_1", "decoder_0", "decoder_1"]
    left_out = 0
    for record in run.stats("train_inner"):
        seen = [i for i, label in enumerate(labels) if any(record[f"moe_load_{label}"])]
        left_out += len(labels) - len(seen)
        for quantity in QUANTITIES:
            listed = record[f"moe_layers_{quantity}"]
            assert [i for i, value in enumerate(listed) if value is not None] == seen
            average = float(record[AVERAGES.get(quantity, f"moe_{quantity}")])
            assert mean(listed[i] for i in seen) == pytest.approx(average, abs=2e-4)
        for i in seen:  # no metric counts padding
            load = record[f"moe_load_{labels[i]}"]
            assert record["moe_layers_max_violation"][i] == pytest.approx(max(load), abs=2e-3)
            assert record["moe_layers_dead_experts"][i] == load.count(0)
            assert record["moe_layers_dropped"][i] == 0
        assert not [key for key in record if key.startswith("moe_dropped_")]
        assert not [key for key in record if re.search(r"_(en|de)coder_\d_expert|violation_d", key)]
    assert 0 < left_out < 8
