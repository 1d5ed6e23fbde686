"""Training is refused if the configuration has options that do not work with experts."""

import argparse
import re

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.option import flag_of
from fairseq_tutel.plugin import register
from fairseq_tutel.plugin.registration import wrapped
from fairseq_tutel.plugin.training import own_layers

register()


def config(**parts):
    cfg = OmegaConf.structured(FairseqConfig, flags={"allow_objects": True, "struct": False})
    cfg.task = {"_name": "language_modeling"}
    cfg.model = argparse.Namespace(_name="transformer_lm", arch="transformer_lm")
    return OmegaConf.merge(cfg, parts)


def test_the_fully_sharded_ddp_backend_is_refused_for_moe_models_only():
    cfg, ran = config(distributed_training={"ddp_backend": "fully_sharded"}), []
    wrapped.run_with_root(ran.append, cfg)
    assert ran == [cfg]
    cfg.model._name = "moe_transformer_lm"
    with pytest.raises(ValueError, match=r"^--ddp-backend is fully_sharded, which does not work with"):
        wrapped.run_with_root(ran.append, cfg)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("distributed_training", "ddp_backend", "slowmo"),
        ("distributed_training", "zero_sharding", "os"),
        ("checkpoint", "write_checkpoints_asynchronously", True),
        ("optimization", "use_bmuf", True),
    ],
)
def test_custom_models_refuse_options_that_do_not_work_with_experts(section, key, value, monkeypatch):
    monkeypatch.setattr(own_layers, "start_together", lambda *_: None)
    cfg = config()
    cfg[section][key] = value
    model = torch.nn.Sequential(MoELayer(MoEConfig(model_dim=2, hidden_dim=2, num_experts=2)))
    with pytest.raises(ValueError, match=f"^{re.escape(flag_of(key))} is "):
        own_layers.prepare(cfg, None, model)
