"""Every tensor that a collective is given lies where the parameters are: NCCL sees no host memory."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.checkpoint import experts
from fairseq_tutel.comm import collectives, gradients
from fairseq_tutel.moe.balance import update_biases
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.state import ZeroState


class Group:
    """A stand-in of a process group."""


GROUP = Group()
TOPOLOGY = Topology(world_size=4, rank=0, expert_parallel_size=2, expert_group=GROUP, replica_group=GROUP)


@pytest.fixture
def calls(monkeypatch):
    """Return the names of the collectives that were called."""
    called: list[str] = []

    def stand_in(name):
        def collective(*arguments, **_):
            for given in arguments:
                for tensor in given if isinstance(given, list) else [given]:
                    assert not isinstance(tensor, Tensor) or tensor.is_meta, f"{name}: {tensor}"
            called.append(name)
            return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

        return collective

    collectives.use(None)
    monkeypatch.setattr(dist, "all_reduce", stand_in("all_reduce"))
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(collectives, name, stand_in(name[1:]))
    monkeypatch.setattr(world, "size", lambda group=None: 4 if group is None else 2)
    return called


def expert(*shape: int, with_gradient: bool = True) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    gradients.mark_expert(parameter)
    parameter.grad = torch.empty_like(parameter) if with_gradient else None
    return parameter


@pytest.mark.parametrize("with_gradient", (True, False))
def test_gradients_of_experts_their_norm_and_overflow(calls, with_gradient):
    parameters = [expert(2, 3, with_gradient=with_gradient)]
    assert gradients.global_grad_norm(parameters, TOPOLOGY).is_meta
    gradients.reduce_expert_gradients(parameters, TOPOLOGY)
    gradients.spread_overflow(parameters)
    assert calls == ["all_reduce"] * 3


def test_balance_biases_and_experts_gathered_everywhere(calls):
    config = MoEConfig(model_dim=4, hidden_dim=6, num_experts=4, balance_bias=True)
    layer = MoELayer(config, TOPOLOGY, seed=1).to("meta")
    update_biases(layer)
    experts.gather_everywhere(layer, TOPOLOGY)
    assert calls == ["all_reduce"] + ["all_gather"] * len(layer.experts.expert_parameters())


def test_zero_s_gradients_and_norm_and_state_in_host_memory(calls):
    parameters = [nn.Parameter(torch.empty(5, device="meta")) for _ in range(2)]
    zero = ZeroState(parameters, TOPOLOGY, stage=1)
    parameters[0].grad = torch.empty(5, device="meta")  # the other was not used
    zero.reduce()
    assert zero.norm().is_meta
    zero.buckets[0].gather_weights().wait()
    assert zero.partitions[0].whole(torch.ones(2)).is_meta
    assert calls == ["reduce_scatter", "all_reduce", "all_gather", "all_gather"]
