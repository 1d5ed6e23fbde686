"""What is checked of any run's configuration."""

import argparse
import math
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.option import flag_of
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.registration import wrapped
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training import own_layers

register()


def config(**parts):
    cfg = OmegaConf.structured(FairseqConfig, flags={"allow_objects": True, "struct": False})
    cfg.task = {"_name": "language_modeling"}
    cfg.model = argparse.Namespace(_name="transformer_lm", arch="transformer_lm")
    return OmegaConf.merge(cfg, parts)


def test_a_sharding_wrapper_is_refused_for_experts_before_fairseq_looks_for_its_package():
    cfg, ran = config(distributed_training={"ddp_backend": "fully_sharded"}), []
    wrapped.run_with_root(ran.append, cfg)
    assert ran == [cfg]
    cfg.model._name = "moe_transformer_lm"
    with pytest.raises(ValueError, match=r"^--ddp-backend is fully_sharded, which would shard or average"):
        wrapped.run_with_root(ran.append, cfg)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("distributed_training", "ddp_backend", "slowmo"),
        ("checkpoint", "write_checkpoints_asynchronously", True),
        ("ema", "ema_decay", 2.0),
    ],
)
def test_options_that_break_experts_are_refused_for_a_user_s_own_layers(section, key, value, monkeypatch):
    monkeypatch.setattr(own_layers, "start_together", lambda *_: None)
    cfg = config(ema={"store_ema": True})
    cfg[section][key] = value
    model = torch.nn.Sequential(MoELayer(MoEConfig(model_dim=2, hidden_dim=2, num_experts=2)))
    with pytest.raises(ValueError, match=f"^{re.escape(flag_of(key))} is "):
        own_layers.prepare(cfg, None, model)


SEEDS = {
    "missing": (None, r"^--ema-seed-model names \S+a\.pt, which does not exist; give"),
    "without": ({}, r"a\.pt, which has no moving average of --store-ema; give a full checkpoint of a run"),
    "good": ({"ema": {"w": torch.ones(2)}}, None),
}


@pytest.mark.parametrize("case", SEEDS)
def test_a_seed_of_averages_is_checked_before_the_model_is_built(tmp_path, case):
    (extra, expected), ran = SEEDS[case], []
    if extra is not None:
        torch.save({"model": {"w": torch.ones(2)}, "extra_state": extra}, tmp_path / "a.pt")
    cfg = config(ema={"store_ema": True, "ema_seed_model": str(tmp_path / "a.pt")})
    cfg.model._name = "moe_transformer_lm"
    if expected is None:
        wrapped.run_with_root(ran.append, cfg)
        assert ran == [cfg]
        return
    with pytest.raises(ValueError, match=expected):
        wrapped.run_with_root(ran.append, cfg)


@pytest.mark.parametrize("decay", [-0.1, 1.5])
def test_a_decay_that_is_no_average_is_refused(decay):
    cfg = config(ema={"store_ema": True, "ema_decay": decay})
    cfg.model._name = "moe_transformer_lm"
    with pytest.raises(ValueError, match=rf"^--ema-decay is {decay}; give a number from 0 to 1"):
        wrapped.run_with_root(lambda cfg: None, cfg)


@pytest.mark.parametrize(
    ("section", "key", "value"), [("optimization", "lr", [0.1, math.nan]), ("model", "dropout", math.nan)]
)
def test_nan_is_refused_as_any_option(section, key, value):
    cfg = config()
    setattr(getattr(cfg, section), key, value)
    with pytest.raises(ValueError, match=f"^--{key} is nan; give a number"):
        wrapped.run_with_root(lambda cfg: None, cfg)


def test_options_of_experts_are_said_to_have_no_effect_on_a_dense_checkpoint(tmp_path, monkeypatch, caplog):
    words = ["generate", "--user-dir", "x", "--moe-expert-store", "on-demand", "--beam", "2"]

    def said_of(words, running=None, name="layers.0.fc1.weight"):
        caplog.clear()
        monkeypatch.setattr("sys.argv", words)
        monkeypatch.setattr(RUN, "cfg", running)
        state = {"args": None, "cfg": {"model": {}}, "model": {name: torch.ones(2)}}
        state |= {"optimizer_history": [{"num_updates": 1, "lr_scheduler_state": {}}]}
        state["extra_state"] = {"epoch": 1, "train_iterator": {"epoch": 1}}
        state["optimizer_history"][0]["optimizer_name"] = "x"
        torch.save(state, tmp_path / "a.pt")
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "a.pt"), {})
        return caplog.text

    expected = f"--moe-expert-store on-demand has no effect: {tmp_path}/a.pt has no experts"
    evaluation, training = (
        SimpleNamespace(common_eval=SimpleNamespace(path=path)) for path in ("a.pt", None)
    )
    assert expected in said_of(words)
    assert expected in said_of(words, evaluation)
    assert not said_of(words, training)
    assert not said_of([word for word in words if word != "--user-dir"])
    assert not said_of(words, name="layers.0.fc1.experts.fc1_weight")
