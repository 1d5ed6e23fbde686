"""Trains one model on 1 and on 4 ranks through the command line, and compares logs and checkpoints."""

import pytest
import torch
from cli import fairseq
from models import lm_args, mt_args

EXEMPT_WITH_ADAM = "k_proj.bias"  # its exact gradient is 0, and Adam amplifies rounding errors


def assert_ranks_agree(kind, data, extra, tmp_path):
    """Train on 1 rank and on 4 ranks with equal micro-batches; assert almost equal metrics and weights."""
    make = {"lm": lm_args, "mt": mt_args}[kind]
    results = {}
    for ranks in (1, 4):
        save = tmp_path / str(ranks)
        fairseq("train", *make(data, save, *extra, "--update-freq", 4 // ranks, updates=4), ranks=ranks)
        results[ranks] = torch.load(save / "checkpoint_last.pt", weights_only=False)
    expected = facts_of(results[1])
    assert expected["moe_gate_loss 0"] > 0.5
    assert expected["gnorm 0"] > 0
    assert facts_of(results[4]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    same_weights(results[1]["model"], results[4]["model"], adam="moe_sgd" not in extra)


def learns(run):
    """Assert that a training run reduces the loss and logs a balance loss and the load of experts."""
    first, *_ = stats = run.stats("train_inner")
    of = len(stats) // 3
    assert sum(float(log["loss"]) for log in stats[-of:]) < sum(float(log["loss"]) for log in stats[:of])
    assert float(first["moe_gate_loss"]) > 0.5
    assert [key for key in first if key.startswith("moe_load")]


def facts_of(checkpoint):
    """Return the training metrics in a checkpoint: unrounded averages over an epoch, without times."""
    aggregators = dict(checkpoint["extra_state"]["metrics"])
    facts = {}
    for _, name, _, state in aggregators["train"]:
        if state.get("count", 0) and "sum" in state:
            average = torch.as_tensor(state["sum"]) / float(state["count"])
            for i, value in enumerate(average.reshape(-1).tolist()):
                facts[f"{name} {i}"] = value
    timing = ("wps", "ups", "train_wall", "wall", "lr")
    return {name: value for name, value in facts.items() if name.split()[0] not in timing}


def same_training(one, two):
    """Assert that the last checkpoints of two SGD runs have almost equal metrics and weights."""
    expected, found = (
        torch.load(folder / "checkpoint_last.pt", weights_only=False) for folder in (one, two)
    )
    facts = facts_of(expected)
    assert facts["moe_gate_loss 0"] > 0.5
    assert facts_of(found) == pytest.approx(facts, rel=1e-5, abs=1e-6)
    same_weights(expected["model"], found["model"], adam=False)


def same_weights(expected, found, adam):
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        if not (adam and name.endswith(EXEMPT_WITH_ADAM)):
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def same_bits(expected, found):
    """Assert that two nested dictionaries of tensors and numbers are equal, bit for bit."""
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            same_bits(value, found[key])
        elif torch.is_tensor(value):
            assert torch.equal(value, found[key]), key
        else:
            assert value == found[key], key
