"""A layer compiled by torch.compile returns the outputs and gradients of the eager layer.

Graph breaks are allowed, because the all-to-all reads row counts on the host.
"""

import dataclasses
import os
import shutil

import pytest
import torch
from compare import close
from normal import normal
from option_values import ROUTING, mixed
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

CONFIG = MoEConfig(model_dim=6, hidden_dim=5, num_experts=4, activation="gelu")
QUICK = [
    {
        "gate_type": "cosine", "gate_projection_dim": 3, "drop_policy": "rts", "capacity_factor": 0.5,
        "prescore": True, "gate_noise": 1.0, "shared_experts": 1, "expert_type": "glu",
        "balance_loss": "gshard_sequence:1,z:0.1",
    },
]  # fmt: skip
LONG = [
    {},
    *QUICK,
    *mixed(ROUTING),
    {
        "choice": "experts", "normalize_gate": "after", "gate_type": "custom_parts.CalmGate",
        "expert_type": "custom_parts.DeepExpert", "residual": True, "activation_dropout": 0.3,
    },
    {"eom": 0.3, "fom": 0.2, "cmr": True, "cmr_gate_drop": 0.3},
]  # fmt: skip
CALL = (True, 3, False)  # (is in training, number of sentences, is time-first)


def run(layer: MoELayer, forward, num_sentences: int, time_first: bool) -> dict[str, Tensor]:
    x = normal(num_sentences, 5, 6, seed=2)
    x = (x.transpose(0, 1) if time_first else x).requires_grad_()
    ids = torch.arange(num_sentences * 5).view(num_sentences, 5)
    layer.zero_grad()
    torch.manual_seed(3)
    y, output = forward(x, ids % 5 >= 4 - ids // 5 % 2, time_first=time_first)
    (y.square().sum() + output.balance_loss).backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    kept_TK = (output.routing.row_of_TK >= 0).double()
    return {"y": y, "loss": output.balance_loss, "kept": kept_TK, "x": x.grad, **grads}


def compare(options: dict, backend: str, calls: tuple) -> None:
    torch._dynamo.reset()
    config = dataclasses.replace(CONFIG, **options)
    eager, layer = (MoELayer(config, seed=1).double() for _ in range(2))
    compiled = torch.compile(layer, backend=backend)
    for training, num_sentences, time_first in calls:
        eager.train(training)
        layer.train(training)
        expected = run(eager, eager, num_sentences, time_first)
        got = run(layer, compiled, num_sentences, time_first)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            close(got[name], tensor, name)
        if eager.balance_bias is not None:
            assert torch.equal(layer.balance_bias.load, eager.balance_bias.load)
            assert layer.balance_bias.load.any()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("options", QUICK, ids=str)
def test_a_compiled_layer_equals_the_eager_layer(options):
    compare(options, "eager", (CALL,))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("options", LONG, ids=str)
def test_a_compiled_layer_with_more_options_equals_the_eager_layer(options):
    compare(options, "aot_eager", (CALL, (False, 3, True), (True, 4, True)))


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="torch.compile's default backend needs a C++ compiler on a CPU (g++, or $CXX)",
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_inductor_backend_returns_the_eager_results():
    # The layer draws no random numbers, because inductor draws other random numbers than eager mode.
    compare(
        {"capacity_factor": 0.5, "drop_policy": "bpr", "residual": True},
        "inductor",
        (CALL, (False, 3, True)),
    )


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_torch_compiles_a_layer_of_a_model_only_in_the_first_two_micro_batches():
    torch._dynamo.reset()
    layer = MoEFeedForward(CONFIG, Topology(), 1, "decoder.layers.0.fc1")
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    counts = []
    for _ in range(5):
        layer.begin_micro_batch()
        compiled(torch.randn(5, 3, 6)).sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] > 0 and counts[-1] == counts[1]
