"""Only the parts of a model that --moe-train-only names are trained."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from torch import nn

from fairseq_tutel import MoEConfig, MoELayer, plugin
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.training.options import TaskConfig

plugin.register()
from fairseq_tutel.plugin.training.train_only import freeze, refuse_other_parts  # noqa: E402

E = 4


def model_of(rank=None):
    """Return a model with one MoE layer; with `rank`, the layer has the experts of one of two ranks."""
    topology = Topology() if rank is None else Topology(rank=rank, world_size=2, expert_parallel_size=2)
    layer = MoELayer(MoEConfig(model_dim=2, hidden_dim=2, num_experts=E, cmr=True), topology)
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"embed": nn.Embedding(3, 2), "moe": layer})})
    model["decoder"] = nn.Linear(2, 3, bias=False)
    model["decoder"].weight = model["encoder"]["embed"].weight  # tied
    return model


def frozen_by(text, model, weight_decay=0.0):
    """Freeze the parameters that `text` does not name; return the names of the trained parameters."""
    freeze(_root(text, weight_decay), model)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _root(text, weight_decay=0.0):
    return SimpleNamespace(
        task=SimpleNamespace(moe_train_only=text), optimizer=SimpleNamespace(weight_decay=weight_decay)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gates", ("moe.gate", "moe.beside.cmr_gate")),
        ("experts", ("moe.experts", "moe.beside.dense")),
        ("dense", ("embed",)),
        ("embeddings", ("embed",)),
        ("decoder", ("embed",)),
        ("decoder.*,*.fc2_weight", ("embed", "moe.experts.fc2_weight", "moe.beside.dense.fc2_weight")),
        ("encoder", ("embed", "moe")),
        ("", ("embed", "moe")),
    ],
)
def test_only_the_named_parameters_have_gradients(text, expected):
    model = model_of()
    names = tuple(f"encoder.{name}" for name in expected)
    assert frozen_by(text, model) == {n for n, _ in model.named_parameters() if n.startswith(names)}


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_only_the_named_experts_have_nonzero_gradients(rank):
    model = model_of(rank)
    assert frozen_by("expert:1,2", model) == {
        f"encoder.moe.experts.{name}" for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    }
    experts = model["encoder"]["moe"].experts
    sum(parameter.sum() for parameter in experts.parameters()).backward()
    here = range(E) if rank is None else range(2 * rank, 2 * rank + 2)
    for parameter in experts.parameters():
        changed = [bool(grad.all()) for grad in parameter.grad]
        assert changed == [number in (1, 2) for number in here]
        assert all(bool(grad.any()) == keep for grad, keep in zip(parameter.grad, changed, strict=True))


def test_weight_decay_is_refused_if_it_would_change_frozen_experts():
    with pytest.raises(ValueError, match=r"--weight-decay is 0\.1"):
        frozen_by("expert:1", model_of(), weight_decay=0.1)
    assert frozen_by("experts,expert:1", model_of(), weight_decay=0.0)


@pytest.mark.parametrize(
    "text", ["gate", "decoder.x*", "expert:4", "expert:", "experts,,gates", "expert:1,x"]
)
def test_a_name_that_matches_no_parameter_is_refused(text):
    with pytest.raises(ValueError, match="--moe-train-only"):
        frozen_by(text, model_of())


@pytest.mark.parametrize("kind", [OmegaConf.create, lambda options: Namespace(**options)])
def test_an_optimizer_state_saved_with_another_moe_train_only_is_refused(kind):
    state = {
        "cfg": {"task": kind({"moe_train_only": "gates,dense"})},
        "last_optimizer_state": {"state": {}},
    }
    refuse_other_parts(_root("dense,gates"), state, "a.pt")
    refuse_other_parts(_root("experts"), {**state, "last_optimizer_state": None}, "a.pt")
    with pytest.raises(ValueError, match=r"is empty, but a\.pt .*with gates,dense; add --reset-optimizer"):
        refuse_other_parts(_root(TaskConfig().moe_train_only), state, "a.pt")
